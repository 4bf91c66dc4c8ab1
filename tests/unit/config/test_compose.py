"""Composing: precedence, conveniences over plain Hydra, a user's own folder, and back to YAML."""

import dataclasses

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values, to_yaml
from hfdist.config.data import SourceConfig, SourceKind
from hfdist.config.optimizer import Schedule
from hfdist.config.plan import PlanConfig, compose_plan
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError
from tests.marks import many
from tests.unit.config.shipped import EXPERIMENTS, OPTIONS, needed_overrides, primary_for


def write(folder, **files):
    """Make YAML files; `group__name` is the file group/name.yaml."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_command_line_wins_over_the_experiment_and_that_over_presets():
    assert compose_config().train.max_steps == 100
    assert compose_config(["+experiment=stdlib_small"]).train.max_steps == 2000
    assert compose_config(["+experiment=stdlib_small", "train.max_steps=7", "optimizer.warmup_steps=1"]).train == (
        dataclasses.replace(compose_config(["+experiment=stdlib_small"]).train, max_steps=7)
    )


def test_a_section_beside_the_config_is_given_whole_as_well():
    assert compose_plan(["plan={processes: 2, search: true}", "plan.best=3"]) == (
        PlanConfig(processes=2, search=True, best=3)
    )
    with pytest.raises(ConfigError, match="does not fit") as caught:
        compose_plan(["plan={processes: many}"])
    assert caught.value.where == "plan (command line)"


def test_an_experiment_is_chosen_with_or_without_a_plus():
    assert compose_config(["experiment=demo"]) == compose_config(["+experiment=demo"])


def test_enums_become_members_and_references_are_resolved():
    config = compose_config(["optimizer.schedule=wsd", "run.name=abc"])
    assert config.optimizer.schedule is Schedule.wsd
    assert config.run.dir == "runs/abc"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_members_of_free_mappings_need_no_plus(plus):
    config = compose_config(
        [
            f"{plus}model.config.num_key_value_heads=1" if plus != "+" else "+model.config.attention_bias=true",
            f"{plus}train.arguments.torch_empty_cache_steps=10",
            "strategy=zero1",
            f"{plus}strategy.deepspeed.zero_optimization.reduce_bucket_size=1000",
        ]
    )
    assert config.train.arguments == {"torch_empty_cache_steps": 10}
    assert config.strategy.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1000}}
    assert config.model.config["hidden_size"] == 512


def test_a_free_mapping_given_whole_is_merged():
    given = {"hidden_size": 64, "attention_bias": True}
    config = compose_config(["model.config={hidden_size: 64, attention_bias: true}"]).model.config
    assert config == compose_config().model.config | given


def test_sources_are_added_from_the_command_line():
    config = compose_config(
        [
            "data=stdlib",
            "data.sources.mine.kind=files",
            "data.sources.mine.path='/a b/*.jsonl.gz'",
            "+data.sources.other={kind: hub, path: some/set, subset: x}",
            "data.sources.other.revision=1e5",
        ]
    )
    assert list(config.data.sources) == ["stdlib", "mine", "other"]
    assert config.data.sources["mine"].path == "/a b/*.jsonl.gz"
    assert config.data.sources["mine"].split == "train"
    assert config.data.sources["other"].kind is SourceKind.hub
    assert config.data.sources["other"].revision == "1e5"


@pytest.mark.parametrize("text", ["1e5", "0123", "true"])
def test_text_that_looks_like_a_number_stays_text(text):
    assert compose_config([f"run.name={text}"]).run.name == text


# A user's own folder


def test_own_presets_experiments_and_primaries(tmp_path):
    write(
        tmp_path,
        model__mine="defaults: [tiny]\nconfig: {hidden_size: 32}\n",
        experiment__ours="# @package _global_\ndefaults:\n  - override /model: mine\nrun: {name: ours}\n",
        main="defaults: [pretrain, _self_]\nrun: {name: main}\n",
    )
    ours = compose_config(["+experiment=ours"], extra_dir=tmp_path)
    assert (ours.run.name, ours.model.config["hidden_size"], ours.model.config["num_hidden_layers"]) == ("ours", 32, 2)
    assert compose_config(["model=tiny"], name="main", extra_dir=tmp_path).run.name == "main"
    assert compose_config(["+experiment=ours"], name="main.yaml", extra_dir=str(tmp_path)).run.name == "ours"


def test_an_own_file_wins_over_a_shipped_one_of_the_same_name(tmp_path):
    write(tmp_path, optimizer__adamw="lr: 0.5\n")
    assert compose_config(extra_dir=tmp_path).optimizer.lr == 0.5
    assert compose_config().optimizer.lr == 3e-4


def test_files_that_are_not_chosen_do_no_harm(tmp_path):
    write(tmp_path, optimizer__broken="lr: [\n", model__mine="defaults: [tiny]\ntype: llama\n")
    assert compose_config(["model=mine"], extra_dir=tmp_path).model.type == "llama"


def test_files_that_start_with_an_underscore_are_parts(tmp_path):
    write(tmp_path, model___part="type: gpt2\nconfig: {}\n", model__mine="defaults: [_part]\nconfig: {n_embd: 8}\n")
    assert compose_config(["model=mine"], extra_dir=tmp_path).model.config == {"n_embd": 8}


# And back


def composed_again(config, folder, *overrides):
    """What the run folder's config.yaml composes to."""
    (folder / "config.yaml").write_text(to_yaml(config))
    return compose_config(overrides, name="config", extra_dir=folder)


# Each option of the large groups, with some of the others; test_shipped.py composes those of the small ones.
LARGE = {group: [option for other, option in OPTIONS if other == group] for group in ("model", "data", "strategy")}
CHOICES = [
    [(group, options[number % len(options)]) for group, options in LARGE.items()]
    for number in range(max(map(len, LARGE.values())))
]


# Experiments choose among these options, and their own values have the same types.
TAKEN = ("arithmetic_grpo", "llama3_8b_lora")


@pytest.mark.parametrize(
    "choices",
    [*CHOICES, *([("experiment", one)] if one in TAKEN else many([("experiment", one)]) for one in EXPERIMENTS)],
    ids=str,
)
def test_the_saved_config_composes_to_the_same(choices, tmp_path):
    overrides = [text for choice in choices for text in ("=".join(choice), *needed_overrides(*choice))]
    config = compose_config(overrides, name=primary_for(*choices[0]))
    assert isinstance(config, RunConfig)
    assert composed_again(config, tmp_path) == config


def test_a_path_that_is_not_utf8_comes_back(tmp_path):
    path = "/data/\udcff ü.txt"
    config = compose_config(["data=files", f'data.sources.files.path="{path}"', "run.name=mine"])
    assert composed_again(config, tmp_path).data.sources["files"].path == path


TEXTS = [
    *("1e5", "null", "true", "", "???!", "a: b", "#x", "é\n\t'\""),
    *("${run.name}", r"\${x}", r"\\${x", "${oc.env:HOME}"),
]


def test_any_text_survives_the_saved_config(tmp_path):
    config = compose_config()
    config.train.freeze = TEXTS
    config.model.config["note"] = [TEXTS, {"deep": TEXTS}]
    assert composed_again(config, tmp_path) == config


def test_the_saved_config_takes_overrides(tmp_path):
    config = compose_config(["train.max_steps=9", "train.epochs=3"])
    assert config.data.sources["stdlib"].epochs == 3
    again = composed_again(config, tmp_path, "train.seed=3", "model.config.hidden_size=64", "train.epochs=null")
    assert (again.train.max_steps, again.train.seed, again.model.config["hidden_size"]) == (9, 3, 64)
    assert again.data.sources["stdlib"].epochs is None
    with pytest.raises(ConfigError, match="lists no group `model`"):
        composed_again(config, tmp_path, "model=tiny")


def test_the_saved_config_does_not_switch_remote_code_on(tmp_path):
    config = compose_config(["model.trust_remote_code=true"])
    assert composed_again(config, tmp_path).model.trust_remote_code is False
    assert composed_again(config, tmp_path, "model.trust_remote_code=true") == config


def test_the_saved_config_has_no_command(tmp_path):
    config = compose_config(["report.alert_command='cat -u'"])
    assert composed_again(config, tmp_path).report.alert_command is None
    assert "cat -u" not in to_yaml(config)
    assert "alert_command" not in to_values(config)["report"]


def test_composing_writes_nothing_and_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_config(["+experiment=demo"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["chats.jsonl", "/texts/*.parquet", "a folder/it's.txt", "s3://bucket/texts/"])
def test_the_group_of_data_takes_files_too(path):
    config = compose_config([f"data={path}", "data.seed=3"])
    assert config.data.sources == {"files": SourceConfig(path=path)}
    assert config.data.seed == 3
