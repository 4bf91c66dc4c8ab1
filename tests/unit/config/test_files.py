"""What people get wrong in files, and what a hostile file may not do."""

import os
import shlex
import time

import pytest

from hfdist.config.cli.about_run import read_line
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.composition.defaults_list import refuse_config_of_others
from hfdist.config.composition.files import MAX_BYTES, read_config, refuse_references
from hfdist.config.composition.refused_values import refuse_resolver
from hfdist.errors import ConfigError
from tests.unit.config.shipped import CONF

GLOBAL = "# @package _global_\n"


def error_of(tmp_path, monkeypatch, text, *overrides):
    """The error that an experiment with this text causes, composed from inside the folder."""
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        compose_config(["+experiment=mine", *overrides], extra_dir=".")
    return caught.value


FILE = "experiment/mine.yaml"
REMOTE = "model:\n  trust_remote_code: "
TASKS = "evaluate:\n  lm_eval_include: tasks\n"

DEEP_BY_ALIASES = "".join(
    f"a{i}: &a{i} " + "[" * 20 + (f"*a{i - 1}" if i else "x") + "]" * 20 + "\n" for i in range(60)
)
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
)

# text -> (where, part of the message, hint)
MISTAKES = {
    "unknown key": (
        "train:\n  max_step: 3\n",
        f"train.max_step ({FILE}, line 3)",
        "no key",
        "`train: {max_steps: ...}`",
    ),
    "unknown section": ("optimizr:\n  lr: 3\n", f"optimizr ({FILE}, line 2)", "no key or group", "optimizer"),
    "synonym": (
        "train:\n  learning_rate: 3\n",
        f"train.learning_rate ({FILE}, line 3)",
        "no key",
        "`optimizer: {lr: ...}`",
    ),
    "wrong type": ("train:\n  max_steps: many\n", f"train.max_steps ({FILE}, line 3)", "a whole number >= 1", None),
    "wrong enum": (
        "train: {precision: bf15}\n",
        f"train.precision ({FILE})",
        "fp32, bf16, fp16, fp8",
        "precision: bf16",
    ),
    "null": ("optimizer:\n  beta1:\n", f"optimizer.beta1 ({FILE}, line 3)", "needs a value, not null", None),
    "list for a section": ("train: [1, 2]\n", None, "train", None),
    "unknown group": ("defaults: [override /optimzer: adamw]\n", f"optimzer ({FILE})", "no key or group", "optimizer"),
    "unknown group, added": ("defaults: [/optimzer: adamw]\n", FILE, "no group `optimzer`", "optimizer: adamw"),
    "unknown option": ("defaults: [override /optimizer: adam]\n", f"optimizer ({FILE})", "adamw, adamw_fine", "=adamw"),
    "defaults is no list": ("defaults: 5\n", FILE, "must be a list", None),
    "defaults with two keys": ("defaults: [{a: 1, b: 2}]\n", FILE, "Too many keys", None),
    "dead reference": ("run:\n  dir: ${run.nme}\n", "run.dir", "run.nme", "${run.name}"),
    "syntax": ("train: {max_steps: 3\n", FILE + ", line 3", "not valid YAML", None),
    "tab": ("train:\n\tmax_steps: 3\n", FILE + ", line 3", "not valid YAML", "indent with spaces"),
    "duplicate": ("train:\n  seed: 1\n  max_steps: 3\n  seed: 2\n", FILE + ", line 5", "key twice", "lines 3 and 5"),
    "missing": ("run:\n  name: ???\n", f"run.name ({FILE}, line 3)", "typed default", "null"),
    "not a mapping": ("- train\n", FILE + ", line 2", "not a mapping", None),
    "target": ("model:\n  config: {x: [{_target_: os}]}\n", FILE + ", line 3", "model.config.x.0._target_", None),
    "target in a list": ("report:\n  to: [{_target_: a}]\n", FILE + ", line 3", "_target_", None),
    "remote code": (
        REMOTE + "true\n",
        f"model.trust_remote_code ({FILE}, line 3)",
        "runs Python",
        "=true on the command",
    ),
    "tasks": (TASKS, f"evaluate.lm_eval_include ({FILE}, line 3)", "may run Python code", "on the command line"),
    "alert command": (
        "report:\n  alert_command: cat\n",
        f"report.alert_command ({FILE}, line 3)",
        "a file cannot give it",
        "on the command line",
    ),
    "alert command as a list": ("report: {alert_command: [cat]}\n", None, "a file cannot give it", None),
    "alert command by reference": ("report: {alert_command: '${run.name}'}\n", None, "a file cannot give it", None),
    "remote code by another word": (REMOTE + "'on'\n", None, "runs Python code", None),
    "remote code by reference": (REMOTE + "${report.plot}\n", None, "runs Python code", None),
    "remote code through an alias": ("report: {plot: &yes true}\n" + REMOTE + "*yes\n", None, "runs Python code", None),
    "environment": ("run:\n  dir: ${oc.env:HOME}\n", f"run.dir ({FILE}, line 3)", "environment", None),
    "environment in a key": ("model:\n  config: {'${oc.env:HOME}': 1}\n", None, "environment", None),
    "environment in a list": ("report:\n  to: ['${oc.env:X}']\n", f"report.to.0 ({FILE}, line 3)", "environment", None),
    "search path": ("hydra:\n  searchpath: [file:///etc]\n", FILE + ", line 3", "hydra.searchpath", "--config-dir"),
    "search path, merged": ("<<: {hydra: {searchpath: [file:///etc]}}\n", FILE + ", line 2", "hydra.searchpath", None),
    "remote code, merged": ("model: {<<: [{name: x}, {trust_remote_code: true}]}\n", None, "runs Python code", None),
    "depth by aliases": (DEEP_BY_ALIASES, None, "nested too deeply", None),
    "tag": ("run: {name: !x y}\n", f"{FILE}, line 2", "not valid YAML", None),
    "NUL": ('run: {name: "a\\0b"}\n', f"run.name ({FILE}, line 2)", "a NUL character", None),
    "deep text": (f"train: {{max_stepss: '{'[' * 50_000}'}}\n", None, "there is no key `train.max_stepss`", None),
    "callbacks": ("hydra:\n  callbacks: {x: {a: 1}}\n", FILE + ", line 3", "hydra.callbacks", None),
    "depth": ("x: " + "[" * 200 + "]" * 200 + "\n", None, "nested too deeply", None),
    "great depth": ("x: " + "[" * 50_000, None, "nested too deeply", None),
    "loop": ("x: &a\n  y: *a\n", FILE + ", line 2", "contains it", None),
    "python object": ("x: !!python/object/apply:os.system [ls]\n", None, "", None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_message_with_file_line_and_way_out(name, tmp_path, monkeypatch):
    text, where, message, hint = MISTAKES[name]
    error = error_of(tmp_path, monkeypatch, GLOBAL + text)
    if where is not None:
        assert error.where == where
    assert message in str(error)
    if hint is not None:
        assert hint in (error.hint or ""), error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the config file is empty"),
        ("# @package a b\nrun: {name: x}\n", "# @package _global_, or none"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * (MAX_BYTES + 1), f"<= {MAX_BYTES} bytes"),
        (BOMB, "unfolds to too many values"),
    ],
    ids=["empty", "header", "no text", "too big", "aliases"],
)
def test_a_file_that_is_no_config_costs_nothing(text, words, tmp_path, monkeypatch):
    start = time.process_time()
    error = error_of(tmp_path, monkeypatch, text)
    assert error.where == FILE
    assert words in str(error)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("text", ["!x y", "!!int y", "!!int ''", "!!bool y", "!!timestamp y"])
def test_values_that_cannot_be_made_are_refused_where_a_file_is_read_alone(text, tmp_path):
    (tmp_path / FILE.replace("/", "_")).write_text(f"run: {{name: {text}}}")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_config(tmp_path / FILE.replace("/", "_"))


def test_a_date_is_text(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {deadline: 2030-02-30}")
    assert read_config(tmp_path / "a.yaml") == {"train": {"deadline": "2030-02-30"}}


def test_a_run_of_somebody_else_merges_no_defaults(tmp_path):
    (tmp_path / "config.yaml").write_text("<<: {defaults: [other]}\n")
    with pytest.raises(ConfigError, match="whole by itself"):
        refuse_references(tmp_path / "config.yaml")


def test_a_few_aliases_are_fine(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / FILE).write_text(GLOBAL + "run: {name: &n mine}\nreport: {sample_prompt: *n}\n")
    config = compose_config(["+experiment=mine"], extra_dir=tmp_path)
    assert (config.run.name, config.report.sample_prompt) == ("mine", "mine")


def test_a_yml_file_is_found_out(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yml").write_text("type: llama\n")
    with pytest.raises(ConfigError) as caught:
        compose_config(["model=mine"], extra_dir=tmp_path)
    assert caught.value.hint == "rename mine.yml to mine.yaml"


def test_a_primary_config_must_be_typed(tmp_path):
    (tmp_path / "main.yaml").write_text("run: {nme: x}\n")
    with pytest.raises(ConfigError) as caught:
        compose_config(name="main", extra_dir=tmp_path)
    assert "- run_schema" in str(caught.value.hint)


def test_the_environment_never_reaches_a_config(monkeypatch, tmp_path):
    monkeypatch.setenv("HFDIST_CANARY", "secret")
    for text in ("${oc.env:HFDIST_CANARY}", "x${ oc.env : HFDIST_CANARY}", "${oc.select:run.name}", "${${a}:b}"):
        with pytest.raises(ConfigError, match="environment"):
            refuse_resolver(text, "run.name")
        with pytest.raises(ConfigError) as caught:
            compose_config([f"run.name='{text}'"])
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["${run.name}", "a:b", "${a.${b}}", r"\${oc.env:HOME}", "$x:y", "{a:b}", "${.name}"])
def test_plain_references_and_text_are_not_resolvers(text):
    refuse_resolver(text, "run.name")


def test_deep_references_cost_no_time():
    start = time.process_time()
    refuse_resolver("${" * 50_000 + "}" * 50_000, "run.name")
    assert time.process_time() - start < 2


def test_shipped_files_are_readable_by_all():
    for folder, _, files in os.walk(CONF):
        for name in files:
            assert name.endswith(".yaml"), f"{folder}/{name}"


def test_the_config_of_a_run_has_no_references_and_so_cannot_unfold(tmp_path):
    own = tmp_path / "config.yaml"
    own.write_text(to_yaml(compose_config(["data=files", r"data.sources.files.path=/data/\${x}", "train.max_steps=3"])))
    refuse_references(own)
    doubling = "\n".join(f"    a{i}: ${{.a{i - 1}}}${{.a{i - 1}}}" for i in range(1, 40))
    own.write_text(f"defaults: [run_schema, _self_]\noptimizer:\n  arguments:\n    a0: x\n{doubling}\n")
    with pytest.raises(ConfigError, match="no references") as caught:
        read_line([f"run={tmp_path}"], "plan", ())
    assert caught.value.where.startswith("optimizer.arguments.a1 (")
    for text in (r"${a.b}", r"x\\${a}", "${.a}", "${oc.env:HOME}"):
        own.write_text(f"model:\n  name: '{text}'\n")
        with pytest.raises(ConfigError):
            refuse_references(own)


def test_the_command_for_a_config_of_accelerate_is_one_that_a_shell_takes():
    with pytest.raises(ConfigError) as caught:
        refuse_config_of_others({"compute_environment": "LOCAL_MACHINE"}, "my launch.yaml")
    assert shlex.split(caught.value.hint)[:4] == ["accelerate", "launch", "--config_file", "my launch.yaml"]
