"""The folder of a run without a name."""

import shutil
from pathlib import Path

import pytest

from hfdist.config.cli.unnamed import check_named, choose_run_name
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_yaml
from hfdist.errors import ConfigError


def start(*overrides, name="finetune", leaves="model"):
    """A run that writes its config, and leaves something; gives its folder."""
    overrides = ["model=tiny", *overrides]
    given = [override.partition("=")[0] for override in overrides]
    config = compose_config(overrides, name=name)
    if (found := choose_run_name(config, given)) is not None:
        config = compose_config([*overrides, f"run.name={found}"], name=name)
    folder = config.run.folder.path
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
    assert start("optimizer.lr=3e-4", "run.name=mine") == "runs/mine"
    assert start("optimizer.lr=4e-4", "run.name=mine") == "runs/mine"


def test_other_data_are_another_run():
    assert start("data=a.jsonl") == "runs/finetune"
    assert start("data=b.jsonl") == "runs/finetune-2"
    assert start("data=a.jsonl") == "runs/finetune"


def test_what_no_file_may_say_makes_no_other_run():
    assert start("model.trust_remote_code=true") == start("model.trust_remote_code=true") == "runs/finetune"


def test_who_allows_changes_goes_on():
    assert start() == start("optimizer.lr=3e-4", "checkpoint.allow_changes=true") == "runs/finetune"


def test_its_own_folder_comes_before_one_that_became_free():
    folders = [start(f"optimizer.lr={rate}") for rate in ("1e-4", "2e-4", "3e-4")]
    shutil.rmtree(folders[1])
    assert start("optimizer.lr=3e-4") == folders[2]
    assert start("optimizer.lr=4e-4") == folders[1]


def test_what_refers_to_the_name_follows():
    start()
    config = compose_config(["model=tiny", "optimizer.lr=3e-4", "export.push_to=me/${run.name}", "run.name=finetune-2"])
    assert config.export.push_to == "me/finetune-2"


def test_text_of_a_foreign_config_is_shown_safely(capsys):
    folder = Path(start())
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        text.replace("revision: null", 'revision: "\\e]0;owned\\a' + 3000 * "A" + '"', 1)
    )
    assert start() == "runs/finetune-2"
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert len(said) < 1000


def test_a_config_that_draws_in_other_files_is_not_composed(capsys):
    folder = Path(start())
    (folder / "evil.yaml").write_text("run: {name: x}\n")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("- run_schema\n", "- run_schema\n- evil\n"))
    assert start() == "runs/finetune-2"
    assert "its config cannot be read" in capsys.readouterr().err


def test_a_folder_in_which_nothing_was_left_is_taken():
    assert start(leaves="watch") == "runs/finetune"
    assert start("optimizer.lr=3e-4") == "runs/finetune"


def test_a_config_that_cannot_be_read_is_another_run(capsys):
    folder = Path(start())
    (folder / "config.yaml").write_text("a: ${oc.env:HOME}\n")
    assert start() == "runs/finetune-2"
    assert start("optimizer.lr=3e-4") == "runs/finetune-3"
    # Not for what another folder holds.
    assert capsys.readouterr().err.count("runs/finetune holds another one (its config cannot be read)") == 2


def test_there_is_an_end_to_runs_without_a_name(monkeypatch):
    monkeypatch.setattr("hfdist.config.cli.unnamed._MOST_FOLDERS", 2)
    assert [start(), start("optimizer.lr=3e-4")] == ["runs/finetune", "runs/finetune-2"]
    with pytest.raises(ConfigError, match="many runs without a name"):
        start("optimizer.lr=4e-4")


def test_a_mirror_needs_a_name_that_was_given():
    config = compose_config(["model=tiny", "checkpoint.mirror=s3://bucket/runs"])
    check_named(config, ["checkpoint.mirror", "run.name"])
    with pytest.raises(ConfigError, match="needs a name of its own"):
        check_named(config, ["checkpoint.mirror", "run.dir"])
    check_named(compose_config(["model=tiny"]), [])
