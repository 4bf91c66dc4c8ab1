"""Words that people type in place of keys: a model's path, a file of one's own, a task, a recipe."""

import pytest

from hfdist import __main__ as command_line
from hfdist.config.cli.about_run import read_line
from hfdist.config.cli.arguments import as_config_flags
from hfdist.config.composition.compose import compose_config, to_yaml
from hfdist.errors import ConfigError


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "./models/mine", "~/models/mine", "model.gguf", "it's/mine"])
def test_a_model_may_be_named_where_an_option_stands(name):
    quoted = f'"{name}"' if "'" in name else name
    config = compose_config([f"model={quoted}"], name="finetune")
    assert config.model.name.endswith(name.removeprefix("~"))
    assert config.model == compose_config(["model=hub", f'model.name="{name}"'], name="finetune").model


def test_an_option_of_a_model_stays_one():
    assert compose_config(["model=tiny"]).model.name is None


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        (["to=slurm", "finetune", "train.max_steps=3"], "finetune", ["train.max_steps=3"]),
        (["train.max_steps=3", "dpo"], "tune", ["task=dpo", "train.max_steps=3"]),
        (["recipe=grpo", "to=slurm"], "tune", ["task=grpo"]),
        (["sft"], "finetune", []),
        ([], "pretrain", []),
    ],
)
def test_a_recipe_or_a_task_may_stand_alone(words, recipe, overrides):
    line = read_line(words, "cluster", {}, ("to",))
    assert (line.recipe, line.overrides) == (recipe, overrides)


def test_two_recipes_are_refused():
    with pytest.raises(ConfigError, match="given twice"):
        read_line(["dpo", "recipe=tune"], "cluster", {})


@pytest.mark.parametrize(
    ("name", "recipe", "first"), [("dpo", "tune", ["task=dpo"]), ("sft", "finetune", []), ("tune", "tune", [])]
)
def test_a_task_is_a_command(monkeypatch, name, recipe, first):
    called = []
    monkeypatch.setattr(command_line, "_call", lambda name, arguments, recipes: called.append((name, arguments)))
    monkeypatch.setattr("sys.argv", ["hfdist", name, "train.max_steps=3"])
    command_line.main()
    assert called == [(recipe, [*first, "train.max_steps=3"])]


@pytest.mark.parametrize("flag", ["--config {}", "--config={}"])
def test_a_config_may_be_a_file(tmp_path, flag):
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(compose_config(["model=tiny", "train.max_steps=7"])))
    words = flag.format(file).split()
    assert as_config_flags(["a=1", *words]) == ["a=1", "--config-dir", str(tmp_path), "--config-name", "mine"]
    line = read_line(["optimizer.lr=1e-3", *words], "cluster", {})
    config = line.compose()
    assert (config.train.max_steps, config.optimizer.lr) == (7, 1e-3)


@pytest.mark.parametrize("words", [["--config", "none.yaml"], ["--config"], ["--config=."]])
def test_a_config_that_is_not_there_is_named(words):
    with pytest.raises(ConfigError, match="no such config"):
        as_config_flags(words)
