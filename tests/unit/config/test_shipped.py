"""Every shipped YAML composes, says what it is, and documents its keys."""

import dataclasses
import re
import typing
from enum import Enum
from itertools import chain

import pytest
import yaml

from hfdist.config.composition.compose import compose_config
from hfdist.config.conf_folder import list_groups, list_options
from hfdist.config.model import Init
from hfdist.config.plain_values import plain
from hfdist.config.plan import PlanConfig
from hfdist.config.run import RunConfig
from hfdist.config.schema import ANY_NAME, all_keys, keys_of, members
from hfdist.config.sweep import SweepConfig
from hfdist.errors import ConfigError
from hfdist.tools.jobs.cluster import ClusterConfig
from tests.unit.config.shipped import (
    CONF,
    EXPERIMENTS,
    GROUPS,
    NEEDED,
    OF_PAGES,
    OPTIONS,
    needed_overrides,
    primary_of,
)


def test_the_folder_holds_exactly_these_groups():
    assert set(list_groups(CONF)) == set(GROUPS)
    others = {
        "cluster",
        "hardware",
        "launch",
        "plan",
        "sweep",
        "_sizes",
        "_hydra.yaml",
        "pretrain.yaml",
        "finetune.yaml",
        "tune.yaml",
    }
    assert {path.name for path in CONF.iterdir()} == {*GROUPS, *others}
    for group in GROUPS:
        assert list_options(CONF, group), group


def test_fine_tuning_starts_from_a_pretrained_model_and_tells_rows_by_their_columns():
    config = compose_config(["model.name=some/model"], name="finetune")
    assert config.model.init is Init.pretrained
    assert config.model.tokenizer.name == "some/model"
    assert config.optimizer.lr < RunConfig().optimizer.lr
    assert (config.data.format.name, config.data.too_long.name) == ("auto", "truncate_end")
    assert compose_config().data.format.name == "text"


# That each option composes is part of test_compose.py::test_the_saved_config_composes_to_the_same.


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_options_of_all_groups_compose_within_each_experiment(experiment):
    overrides = [f"+experiment={experiment}", *needed_overrides("experiment", experiment)]
    kept = {"experiment", "model", "task", "data"}
    if primary_of(experiment) == "tune":
        # Islands train next tokens only.
        kept.add("islands")
    # After the others, which so keep the options that go together.
    experiments = [*(name for name in EXPERIMENTS if name not in OF_PAGES), *OF_PAGES]
    for group in GROUPS:
        if group not in kept:
            # One an experiment, and each with some.
            options = [option for other, option in OPTIONS if other == group]
            option = options[experiments.index(experiment) % len(options)]
            overrides += [f"{group}={option}", *needed_overrides(group, option)]
    # Layers with adapters are not cut, and those of 4 bits are not in float8. Few bits do not go with expert ranks.
    overrides += ["strategy.tensor=1", "adapter.quantization=null", "islands.codec=fp32"]
    assert compose_config(overrides, name=primary_of(experiment)).run.name == experiment, overrides


@pytest.mark.parametrize(("choice", "key"), [(c, n[0].partition("=")[0]) for c, n in NEEDED.items()])
def test_a_preset_that_needs_a_value_says_which(choice, key):
    with pytest.raises(ConfigError) as caught:
        compose_config(["=".join(choice)])
    assert key in str(caught.value)


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="=".join)
def test_each_file_opens_with_a_comment_or_explains_each_key(group, option):
    lines = (CONF / group / f"{option}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ") or "#" in lines[0]
    assert all(len(line) <= 120 for line in lines)


def test_a_preset_says_only_what_is_different():
    """Values that equal the default of the dataclass stand in one place: there."""
    defaults = {**plain(RunConfig()), "plan": plain(PlanConfig()), "sweep": plain(SweepConfig())}
    # Those of accelerate have the name of a section.
    del defaults["launch"]
    repeated = []
    for path in sorted(CONF.glob("*/*.yaml")):
        group, values = path.parent.name, yaml.safe_load(path.read_text()) or {}
        # What an option extends may be different from the default.
        if group in defaults and "defaults" not in values:
            repeated += [
                f"{path.name}: {group}.{name}" for name, value in values.items() if value == defaults[group][name]
            ]
    assert not repeated


def test_each_key_says_what_it_is():
    """By the docstring below its field, which stands alone: it is no half of another sentence."""
    sections = {"run", *members("")}
    of_others = chain.from_iterable(keys_of(kind, "") for kind in (PlanConfig, SweepConfig, ClusterConfig))
    for key in [*all_keys().values(), *of_others]:
        if key.name not in sections and key.leaf != ANY_NAME and not dataclasses.is_dataclass(key.type):
            assert key.words, key.name
            assert not re.match(r"(Of|Or|Over|On|By) ", key.words), key.name


LISTED = re.compile(r"  - (\w+): \w+ +# (.* \| .*)")


@pytest.mark.parametrize("name", ["pretrain", "finetune", "tune"])
def test_a_comment_that_lists_options_lists_all(name):
    text = (CONF / f"{name}.yaml").read_text()
    for group, words in LISTED.findall(text):
        assert set(words.split(" | ")) == set(list_options(CONF, group)), group


REFUSED = {"float16"}
"""Values that are known only to say why they are refused."""


def test_a_key_that_lists_its_values_lists_all():
    """Bars in what a key says divide its values, each with words of its own."""
    words = {key.name: key.words for key in all_keys().values() if " | " in (key.words or "")}
    kinds = {key: kind for key in words for kind in enums(all_keys()[key].type)}
    assert {"strategy.schedule", "train.precision"} <= set(kinds)
    for key, kind in kinds.items():
        assert {item.value for item in kind} <= {*re.findall(r"\w+", words[key]), *REFUSED}, key


def enums(kind):
    """The enums of a key's type."""
    return [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and issubclass(one, Enum)]


@pytest.mark.parametrize("name", ["pretrain", "finetune", "tune"])
def test_a_copy_of_a_primary_config_composes_to_the_same(name, tmp_path):
    (tmp_path / "mine.yaml").write_text((CONF / f"{name}.yaml").read_text())
    needed = {"pretrain": [], "finetune": ["model.name=some/model"]}.get(
        name, ["model.name=some/model", "data=a.jsonl"]
    )
    assert compose_config(needed, name="mine", extra_dir=str(tmp_path)) == compose_config(needed, name=name)
