"""Every shipped YAML composes, says what it is, and documents its keys."""

import dataclasses
import re
import typing
from enum import Enum

import pytest
import yaml

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.files import list_groups, list_options
from hfdist.config.composition.help import descriptions
from hfdist.config.model import Init
from hfdist.config.run import RunConfig
from hfdist.config.schema import ANY_NAME, all_keys
from hfdist.errors import ConfigError
from tests.unit.config.shipped import (
    ARITHMETIC,
    CONF,
    EXPERIMENTS,
    GROUPS,
    NEEDED,
    OPTIONS,
    needed_overrides,
    primary_of,
)

# The file of each group in which all its keys stand with a comment.
NAMED = {"model": "small", "adapter": "none", "data": "stdlib", "strategy": "single", "optimizer": "adamw",
         "islands": "none", "task": "causal_lm"}  # fmt: skip
DOCUMENTED_IN = {"run": "pretrain.yaml", "launch": "pretrain.yaml"}
DOCUMENTED_IN |= {group: f"{group}/{NAMED.get(group, 'default')}.yaml" for group in GROUPS if group != "experiment"}


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
    experiments = [*(name for name in EXPERIMENTS if name not in ARITHMETIC), *ARITHMETIC]
    for group in GROUPS:
        if group not in kept:
            # One an experiment, and each with some.
            options = [option for other, option in OPTIONS if other == group]
            option = options[experiments.index(experiment) % len(options)]
            overrides += [f"{group}={option}", *needed_overrides(group, option)]
    # Layers with adapters are not cut, and those of 4 bits are not in float8.
    overrides += ["strategy.tensor=1", "adapter.quantization=null"]
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


def values_in_conf(section):
    """What the file says that documents a section; a primary config holds two sections beside its list of groups."""
    values = yaml.safe_load((CONF / DOCUMENTED_IN[section]).read_text())
    return values[section] if section in ("run", "launch") else values


def test_each_key_stands_in_the_file_that_documents_its_group():
    for key in [key.name for key in all_keys().values()]:
        if key.startswith("data.eval_sources."):
            continue  # described as the sources are
        section, _, rest = key.partition(".")
        values = values_in_conf(section)
        for part in filter(None, rest.split(".")):
            # The source that the file has stands for any.
            part = next(iter(values)) if part == ANY_NAME else part
            assert part in values, key
            values = values[part]


ON_PURPOSE = ["model.type", "model.config", "data.sources", "strategy.data", "checkpoint.every", "report.sample_prompt"]


@pytest.mark.parametrize("section", [s for s in DOCUMENTED_IN if s != "run"])
def test_the_documented_defaults_are_those_of_the_dataclasses(section):
    """Values that a preset sets on purpose are not defaults."""
    values = values_in_conf(section)
    defaults = dataclasses.asdict(getattr(RunConfig(), section))
    for name, value in values.items():
        if f"{section}.{name}" not in ON_PURPOSE:
            # A number where words are allowed, too, is text to the dataclass.
            assert plain(defaults[name]) in (value, str(value)), f"{section}.{name}"


def plain(value):
    """As YAML has it."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return getattr(value, "value", value)


LISTED = re.compile(r"  - (\w+): \w+ +# (.* \| .*)")


@pytest.mark.parametrize("name", ["pretrain", "finetune", "tune"])
def test_a_comment_that_lists_options_lists_all(name):
    text = (CONF / f"{name}.yaml").read_text()
    for group, words in LISTED.findall(text):
        assert set(words.split(" | ")) == set(list_options(CONF, group)), group


REFUSED = {"float16"}
"""Values that are known only to say why they are refused."""


def test_a_comment_that_lists_values_lists_all():
    """Bars in the comment after a key divide its values, each with words of its own."""
    words = {key: text for key, text in descriptions().items() if " | " in text}
    kinds = {key: kind for key in words for kind in enums(all_keys()[key].type)}
    assert {"strategy.schedule", "train.precision"} <= set(kinds)
    for key, kind in kinds.items():
        assert {item.value for item in kind} <= {*re.findall(r"\w+", words[key]), *REFUSED}, key


def enums(kind):
    """The enums of a key's type."""
    return [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and issubclass(one, Enum)]
