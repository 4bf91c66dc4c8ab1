"""What a run cannot use, found before anything large is imported: folders, variables, with `--offline` connections."""

import os
import shlex

import pytest

from hfdist.config.checks.offline import check_offline
from hfdist.config.checks.preflight import check_run
from hfdist.config.cli.command import recipe
from hfdist.config.composition.compose import compose_config
from hfdist.config.override_text import as_override
from hfdist.errors import ConfigError


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("/proc/x", "cannot be used"),  # where root may write by its permissions
        ("file/x", "a file is in the folder's place"),
        ("link", "cannot be used: No such file"),
        ("link/x", "cannot be used: No such file"),
        ("a" * 300, "cannot be used: File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be_made(folder, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=what) as caught:
        check_run(compose_config(["model=tiny", f"run.dir={folder}"]))
    assert caught.value.where == "run.dir"


@pytest.mark.parametrize(
    ("files", "key", "value", "hint"),
    [
        (
            ["my runs/checkpoints/step-00000100/x", "my runs/checkpoints/step-00000120.tmp-1a2b/x"],
            "checkpoint.resume",
            "my runs",
            "'checkpoint.resume=my runs/checkpoints/step-00000100'",
        ),
        (["my model/config.json"], "checkpoint.resume", "my model", "checkpoint.resume=auto 'model=my model'"),
        (["my model/config.json"], "model.name", "my model/config.json", "'model=my model'"),
        (["my run/model/config.json"], "model.name", "my run", "'model=my run/model'"),
        (["my model/config.json"], "adapter.path", "./my model", "'model=./my model', without an adapter.path"),
        (
            ["my files/texts.txt"],
            "data.sources.files.path",
            "my files/text.txt",
            "'data.sources.files.path=my files/texts.txt'",
        ),
        (["my run/run.json"], "data.sources.files.path", "my run", "data=FILE; its model is 'model=my run/model'"),
        (
            ["my tokens/00000.tokens"],
            "data.sources.files.path",
            "my tokens",
            "data=tokens 'data.sources.tokens.path=my tokens' 'model.tokenizer.name=my tokens/tokenizer', in place",
        ),
    ],
)
def test_a_path_with_a_space_is_quoted_in_what_is_to_be_pasted(files, key, value, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("texts", *files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    given = ["model=hub", "model.name=a/b", "data=files", "data.sources.files.path=texts"]
    with pytest.raises(ConfigError) as caught:
        check_run(compose_config([*given, f"{key}='{value}'"]))
    assert caught.value.where == key
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["my runs", "runs (1)", "a,b", "it's", 'x\\"=y', "ü x"])
@pytest.mark.parametrize(
    ("key", "value", "file"),
    [
        ("checkpoint.resume", "{}", "{}/checkpoints/step-00000100"),
        ("data.sources.files.path", "{}/text.txt", "{}/texts.txt"),
    ],
)
def test_what_is_to_be_pasted_is_the_path_again(key, value, file, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file.format(name)).mkdir(parents=True)
    given = ["model=tiny", "data=files", "data.sources.files.path=."]
    with pytest.raises(ConfigError) as caught:
        check_run(compose_config([*given, as_override(key, value.format(name))]))
    config = compose_config([*given, *shlex.split(caught.value.hint)])
    assert file.format(name) in (config.checkpoint.resume, config.data.sources["files"].path)


@pytest.mark.parametrize("folder", ["new/and/deeper", "there"])
def test_looking_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    check_run(compose_config(["model=tiny", f"run.dir={folder}"]))
    assert [found.name for found in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize("key", ["model.name", "data.sources.files.path"])
@pytest.mark.parametrize("path", ["~no_such_user/x", "{tmp_path}/shut/x"])
def test_a_place_into_which_nobody_may_look_is_one_message(key, path, tmp_path, monkeypatch):
    path = path.format(tmp_path=tmp_path)
    files = "data.sources.files.path=texts"
    config = compose_config(["model=hub", "model.name=a/b", "data=files", files, f"{key}='{path}'"])
    if "shut" in path:
        # As it is for those who are not root.
        (tmp_path / "shut").mkdir(mode=0)
        stat = os.stat

        def refuse(name, **options):
            if str(name).endswith("shut/x"):
                raise PermissionError(13, "Permission denied")
            return stat(name, **options)

        monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").touch()
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    assert caught.value.where == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.sources.files.path", "s3://bucket/*.parquet"),
        ("data.sources.files.path", '"https://host/a.jsonl?version=1"'),
        ("export.push_to", "me/model"),
    ],
)
def test_what_needs_a_connection_is_refused(key, value):
    with pytest.raises(ConfigError, match="--offline rules out") as caught:
        check_offline(compose_config(["model=tiny", "data=files", "data.sources.files.path=x", f"{key}={value}"]))
    assert caught.value.where == key


def test_trackers_that_write_to_a_folder_are_not_unless_they_are_told_otherwise(monkeypatch):
    named = {"MLFLOW_TRACKING_URI": "mlflow", "TRACKIO_SPACE_ID": "trackio", "TRACKIO_SERVER_URL": "trackio"}
    for variable in named:
        monkeypatch.delenv(variable, raising=False)
    check_offline(compose_config(["model=tiny", "report.to=[tensorboard,wandb,trackio,mlflow]"]))
    with pytest.raises(ConfigError, match="needs a connection"):
        check_offline(compose_config(["model=tiny", "report.to=comet_ml"]))
    for variable, name in named.items():
        with monkeypatch.context() as patch:
            patch.setenv(variable, "https://user:secret@host/x")
            with pytest.raises(ConfigError, match="another machine") as caught:
                check_offline(compose_config(["model=tiny", f"report.to={name}"]))
            assert caught.value.found == f"{variable}=https://host/x"
    for place in ("sqlite:////here/mlflow.db", "mlruns", "/there/mlruns"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
        check_offline(compose_config(["model=tiny", "report.to=mlflow"]))
    for place in ("databricks", "databricks-uc", "uc"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
        with pytest.raises(ConfigError, match="another machine"):
            check_offline(compose_config(["model=tiny", "report.to=mlflow"]))


@pytest.mark.parametrize("path", ["/texts/*.parquet", "file:///texts/a.jsonl", "texts"])
def test_what_is_here_is_not(path):
    check_offline(compose_config(["model=tiny", "data=files", f"data.sources.files.path={path}"]))


def test_the_flag_switches_the_hub_off_before_the_recipe(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
    seen = []

    @recipe()
    def main(config):
        seen.append((config.model.type, os.environ["HF_HUB_OFFLINE"], os.environ["HF_DATASETS_OFFLINE"]))

    monkeypatch.setattr("sys.argv", ["pretrain.py", "model=tiny", "--offline"])
    main()
    assert seen == [("llama", "1", "1")]
    monkeypatch.setattr("sys.argv", ["pretrain.py", "model=tiny", "--offline", "export.push_to=me/model"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


ZERO1, ZERO2 = (["strategy=zero1", "strategy.min_data=1"], ["strategy=zero2", "strategy.min_data=1"])


@pytest.mark.parametrize(
    ("variables", "overrides", "named"),
    [
        ("ACCELERATE_USE_CPU=true", ZERO1, "ACCELERATE_USE_CPU"),
        ("ACCELERATE_USE_CPU=true", [], None),
        ("ACCELERATE_USE_DEEPSPEED=true", [], "ACCELERATE_USE_DEEPSPEED"),
        ("ACCELERATE_USE_DEEPSPEED=true", ZERO2, None),
        ("ACCELERATE_USE_DEEPSPEED=1 ACCELERATE_DEEPSPEED_ZERO_STAGE=3", ZERO2, "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        ("ACCELERATE_USE_FSDP=1", [], "ACCELERATE_USE_FSDP"),
        ("ACCELERATE_MIXED_PRECISION=bf16", [], "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_MIXED_PRECISION=fp8", [], "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_MIXED_PRECISION=bf16", ["train.precision=bf16"], None),
        ("ACCELERATE_MIXED_PRECISION=no", ["train.precision=bf16"], None),
        ("ACCELERATE_MIXED_PRECISION=bf16", ["train.precision=fp8"], None),
        ("ACCELERATE_MIXED_PRECISION=fp8", ["train.precision=fp8"], None),
        ("ACCELERATE_MIXED_PRECISION=fp16", ["train.precision=fp8"], "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_DYNAMO_BACKEND=INDUCTOR", [], "ACCELERATE_DYNAMO_BACKEND"),
        ("ACCELERATE_DYNAMO_BACKEND=NO", [], None),
    ],
)
def test_a_variable_of_accelerate_that_contradicts_the_config_is_named(variables, overrides, named, monkeypatch):
    config = compose_config(overrides)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    if named is None:
        monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
        check_run(config)
        return
    with pytest.raises(ConfigError, match="contradicts") as caught:
        check_run(config)
    assert caught.value.where == f"{named} (environment)"
    assert f"unset {named}" in caught.value.hint


def test_float8_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="package that is not installed") as caught:
        check_run(compose_config(["train.precision=fp8"]))
    assert (caught.value.where, caught.value.found) == ("train.precision", "fp8, without torchao")


def test_a_launcher_may_ask_for_processes_that_are_not_there_yet(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    topology, batch = check_run(compose_config(["strategy=ddp"]), world_size=2)
    assert (topology.world_size, batch.data_size) == (2, 2)
