"""The folder of a run without a name."""

from pathlib import Path

import pytest

from hfdist.config.cli.unnamed import give_folder
from hfdist.config.composition.compose import compose_config, to_yaml
from hfdist.errors import ConfigError


def start(*overrides, name="finetune", leaves="model", named=()):
    """A run that writes its config, and leaves something; gives its folder."""
    config = compose_config(["model=tiny", *overrides], name=name)
    give_folder(config, named)
    folder = Path(config.run.dir)
    (folder / leaves).mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    assert config.run.name == folder.name
    return str(folder)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_same_command_goes_on_and_another_one_gets_a_folder_of_its_own(capsys):
    assert start(leaves="checkpoints/step-00000001") == "runs/finetune"
    # What leaves the training as it is goes on, too.
    assert start("train.micro_batch_size=1", "strategy=ddp") == "runs/finetune"
    assert capsys.readouterr().err == ""
    assert start("optimizer.lr=3e-4") == "runs/finetune-2"
    said = capsys.readouterr().err
    assert said == (
        "this run is runs/finetune-2, as runs/finetune holds another one (optimizer.lr: 2e-05 -> 0.0003); "
        "run.name=NAME names it\n"
    )
    assert start("optimizer.lr=4e-4") == "runs/finetune-3"
    assert start("optimizer.lr=3e-4") == "runs/finetune-2"
    assert start() == "runs/finetune"


def test_a_name_of_ones_own_stays():
    assert start() == "runs/finetune"
    assert start("optimizer.lr=3e-4", "run.name=mine", named=["optimizer.lr", "run.name"]) == "runs/mine"
    assert start("optimizer.lr=4e-4", "run.name=mine", named=["optimizer.lr", "run.name"]) == "runs/mine"


def test_a_folder_in_which_nothing_was_left_is_taken():
    assert start(leaves="watch") == "runs/finetune"
    assert start("optimizer.lr=3e-4") == "runs/finetune"


def test_a_config_that_cannot_be_read_is_another_run(capsys):
    folder = Path(start())
    (folder / "config.yaml").write_text("a: ${oc.env:HOME}\n")
    assert start() == "runs/finetune-2"
    assert "its config cannot be read" in capsys.readouterr().err


def test_there_is_an_end_to_runs_without_a_name(monkeypatch):
    monkeypatch.setattr("hfdist.config.cli.unnamed._MOST_FOLDERS", 2)
    assert [start(), start("optimizer.lr=3e-4")] == ["runs/finetune", "runs/finetune-2"]
    with pytest.raises(ConfigError, match="many runs without a name"):
        start("optimizer.lr=4e-4")
