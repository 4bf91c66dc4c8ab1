"""`--offline`: the switch, and what it rules out before anything is built."""

import os

import pytest

from hfdist.config.checks.preflight import check_offline
from hfdist.config.cli.command import recipe
from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data=files", "data.sources.files.path=s3://bucket/*.parquet"], "data.sources.files.path"),
        (["data=files", 'data.sources.files.path="https://host/a.jsonl?version=1"'], "data.sources.files.path"),
        (["data=files", "data.sources.files.path=hf://datasets/a/b/*.parquet"], "data.sources.files.path"),
        (["export.push_to=me/model"], "export.push_to"),
    ],
)
def test_what_needs_a_connection_is_refused(overrides, key):
    with pytest.raises(ConfigError, match="--offline rules out") as caught:
        check_offline(compose_config(["model=tiny", *overrides]))
    assert caught.value.where == key


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
