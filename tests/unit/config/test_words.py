"""Words that people type in place of keys: a model's path, a file of one's own, a task, a recipe."""

import pytest

from hfdist import __main__ as command_line
from hfdist.config.cli.about_run import read_line
from hfdist.config.cli.arguments import as_config_flags
from hfdist.config.cli.own_config import as_recipe
from hfdist.config.cli.recipe_names import with_task
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_yaml
from hfdist.errors import ConfigError


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "./models/mine", "~/models/mine", "model.gguf", "it's/mine"])
def test_a_model_may_be_named_where_an_option_stands(name):
    quoted = f'"{name}"' if "'" in name else name
    config = compose_config([f"model={quoted}"], name="finetune")
    assert config.model.name.endswith(name.removeprefix("~"))
    assert config.model == compose_config(["model=hub", f'model.name="{name}"'], name="finetune").model


def test_an_option_of_a_model_stays_one(tmp_path):
    assert compose_config(["model=tiny"]).model.name is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my.model.yaml").write_text("defaults: [tiny]\nname: null\n")
    assert compose_config(["model=my.model"], extra_dir=tmp_path).model.name is None
    with pytest.raises(ConfigError, match="several values"):
        compose_config(["model=a/b,c/d"])


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        (["to=slurm", "finetune", "train.max_steps=3"], "finetune", ["train.max_steps=3"]),
        (["train.max_steps=3", "dpo"], "tune", ["task=dpo", "train.max_steps=3"]),
        (["recipe=grpo", "to=slurm"], "tune", ["task=grpo"]),
        (["simpo"], "tune", ["task=simpo"]),
        (["sft"], "finetune", []),
        ([], "pretrain", []),
    ],
)
def test_a_recipe_or_a_task_may_stand_alone(words, recipe, overrides):
    line = read_line(words, "cluster", {}, ("to",))
    assert (line.recipe, line.overrides) == (recipe, overrides)


def test_values_of_flags_are_no_recipes(tmp_path):
    line = read_line(["--config-dir", "tune", "--config-name", "finetune"], "cluster", {})
    assert line.flags == {"--config-dir": "tune", "--config-name": "finetune"}
    assert (line.recipe, line.overrides) == ("pretrain", [])


def test_a_task_is_said_once():
    with pytest.raises(ConfigError, match="given twice"):
        with_task("dpo", ["task=kto"])
    # The config of a run says its own.
    assert read_line(["dpo", "--config-name", "config"], "cluster", {}).overrides == []


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
    # A folder of one's own is no config, and says no task.
    for flag, task in (("--config-dir=mine", first), ("--config-name=mine", []), ("--config=mine.yaml", [])):
        called.clear()
        monkeypatch.setattr("sys.argv", ["hfdist", name, flag])
        command_line.main()
        assert called == [(recipe, [*task, flag])]


@pytest.mark.parametrize("flag", ["--config {}", "--config={}"])
def test_a_config_may_be_a_file(tmp_path, flag):
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(compose_config(["model=tiny", "train.max_steps=7"])))
    words = flag.format(file).split()
    assert as_config_flags(["a=1", *words]) == ["a=1", "--config-dir", str(tmp_path), "--config-name", "mine"]
    line = read_line(["optimizer.lr=1e-3", *words], "cluster", {})
    config = line.compose()
    assert (config.train.max_steps, config.optimizer.lr) == (7, 1e-3)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--config", "none.yaml"], "no such config"),
        (["--config"], "no such config"),
        (["--config=."], "no such config"),
        (["--config", "x" * 300 + ".yaml"], "no such config"),
        (["--config", "a.yml"], "no such config"),
        (["--config", "tune.yaml"], "hides the shipped one"),
        (["--config", "a.yaml", "--config-dir", "."], "given twice"),
        (["--config", "a.yaml", "--config=a.yaml"], "given twice"),
    ],
)
def test_a_config_that_cannot_be_taken_is_refused(words, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "a.yml", "tune.yaml"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=what):
        as_config_flags(words)


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("defaults: [finetune, _self_]", "finetune"),
        ("defaults: [tune, {override task: grpo}, _self_]", "tune"),
        ("defaults: [base, _self_]", "tune"),
        ("defaults: [experiment/mine, finetune, _self_]", "finetune"),
        ("defaults: [run_schema, _self_]\ntask: {name: kto}", "tune"),
        ("defaults: [run_schema, {task: causal_lm}, _self_]\nmodel: {type: llama}", "pretrain"),
        ("defaults: [run_schema, _self_]\ntask: {name: causal_lm}\nmodel: {name: Qwen/Qwen3-4B}", "finetune"),
    ],
)
def test_a_config_says_its_recipe(tmp_path, text, recipe):
    (tmp_path / "base.yaml").write_text("defaults: [mine, tune]")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert as_recipe(str(file), ["a=1"]) == [recipe, "--config", str(file), "a=1"]
    line = read_line(["a=1", "run", str(file), "b=2"], "cluster", {})
    assert (line.recipe, line.overrides, line.flags["--config-name"]) == (recipe, ["a=1", "b=2"], "mine")


def test_a_run_goes_on_by_its_folder(tmp_path, monkeypatch):
    config = compose_config(["task=dpo", "model=tiny", "data=x.jsonl", "train.max_steps=7"], name="tune")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    line = read_line(["run", str(tmp_path), "optimizer.lr=1e-3"], "plan", {})
    assert line.recipe == "tune"
    assert (line.compose().train.max_steps, line.compose().optimizer.lr) == (7, 1e-3)
    called = []
    monkeypatch.setattr(command_line, "_call", lambda name, arguments, recipes: called.append((name, arguments)))
    monkeypatch.setattr("sys.argv", ["hfdist", "run", str(tmp_path), "optimizer.lr=1e-3"])
    command_line.main()
    assert called == [("tune", ["--config", str(tmp_path / "config.yaml"), "optimizer.lr=1e-3"])]
    (tmp_path / "config.yaml").write_text("defaults: [tune]")
    with pytest.raises(ConfigError, match="whole by itself"):
        as_recipe(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["train: {max_steps: 3}", "defaults: tune", "defaults: [mine]", "task: dpo", "defaults: [{'': dpo}]"]
)
def test_a_config_that_says_no_task_is_told_how(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="does not say what it trains") as error:
        as_recipe(str(file))
    # What the hint says to begin it with.
    for first in error.value.hint.split("`")[1::2]:
        file.write_text(f"{first}\n")
        assert as_recipe(str(file))[0] in ("finetune", "tune")


@pytest.mark.parametrize("flags", [["--config"], ["--config="]])
def test_a_flag_without_a_file_is_not_told_of_a_folder(flags):
    with pytest.raises(ConfigError, match="no such config") as error:
        as_config_flags(flags)
    assert error.value.found is None


def test_a_run_in_the_home_folder_is_found_by_the_name_that_is_like_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("defaults: [tune]")
    with pytest.raises(ConfigError, match="no such config") as error:
        as_recipe("~/runs/firts")
    assert error.value.hint == f"hfdist run {tmp_path}/runs/first"


@pytest.mark.parametrize("arguments", [[], ["none.yaml"], ["strategy=zero2"], ["."], ["x" * 300 + "/y"]])
def test_a_run_without_a_config_is_one_message(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hfdist", "run", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert "no such config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model: m", "`model: {name: m}`"),
        ("base_model: m", "`model: {name: m}`"),
        ("lora: {r: 8}", "`- override /adapter: lora` in the defaults list"),
        ("train: {optimizer: {lr: 1e-4}}", "`optimizer:` is a section of its own, beside `train:`"),
        ("model: {name: '${MODEL_DIR}'}", 'model.name="$MODEL_DIR" on the command line, where the shell puts it in'),
        ("data: {sources: [{path: a.jsonl}]}", "`data: {sources: {files: {path: PATH}}}`: each source has a name"),
        ("training_args: {max_steps: 2}", "`train: {max_steps: 20}` and `optimizer: {lr: 1e-4}`; other TrainingArg"),
        ("max_steps: 2", "`train: {max_steps: 2}`"),
    ],
)
def test_a_mistake_in_a_file_is_answered_as_a_file_has_it(tmp_path, text, hint):
    (tmp_path / "mine.yaml").write_text(f"defaults: [finetune, _self_]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        compose_config(name="mine", extra_dir=tmp_path)
    assert caught.value.hint.startswith(hint), caught.value


def test_a_folder_or_a_file_is_meant_where_no_config_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    (tmp_path / "rows").mkdir()
    config = compose_config(["model=mine", "data=rows"], name="finetune")
    assert (config.model.name, config.data.sources["files"].path) == ("mine", "rows")
    for group, name in (("model", "mine"), ("data", "rows")):
        (tmp_path / "own" / group).mkdir(parents=True)
        option = {"model": "defaults: [hub]\nname: a/b\n", "data": "defaults: [docstrings]\n"}[group]
        (tmp_path / "own" / group / f"{name}.yaml").write_text(option)
    config = compose_config(["model=mine", "data=rows"], name="finetune", extra_dir=tmp_path / "own")
    assert (config.model.name, list(config.data.sources)) == ("a/b", ["docstrings"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["./mine", "a.jsonl"], "model=./mine data=./a.jsonl"),
        (["a.jsonl", "b.jsonl"], "data=mixture '+data.sources.part1={path: a.jsonl}' "),
        (["my rows.jsonl"], "'data=./my rows.jsonl'"),
    ],
)
def test_paths_that_stand_alone_are_all_taken_up(tmp_path, monkeypatch, words, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine/config.json", "a.jsonl", "b.jsonl", "my rows.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        compose_config(words, name="finetune")
    assert caught.value.hint.startswith(hint), caught.value
