"""What a run says that has nothing left to train."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hfdist.config.cli.command import _says_finished, recipe
from hfdist.config.cli.finished import describe_finished, leaves_all_done
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values, to_yaml
from hfdist.config.composition.diff import find_changes
from hfdist.config.model import AdapterConfig
from hfdist.config.optimizer import Schedule
from hfdist.errors import ConfigError
from tests.unit.report.folders import record

COMMAND = ("model=tiny", "run.name=first", "train.max_steps=20")
CONFIG = compose_config(COMMAND)
"""Each composition takes a good part of a second."""


def end(config=CONFIG, **of_record):
    """Leave what a run leaves that has done its 20 steps."""
    folder = Path("runs/first")
    for name in ("checkpoints/step-00000020/manifest.json", "model/model.safetensors", "adapter/adapter.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "run.json").write_text(json.dumps(record(schema=1, **of_record)))
    return folder


def changed(section, **values):
    """The config with other values in a section."""
    return replace(CONFIG, **{section: replace(getattr(CONFIG, section), **values)})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_says_what_was_trained_and_how_to_go_on():
    end()
    said = describe_finished(CONFIG)
    assert said.startswith("nothing left to train: runs/first has done all of its 20 steps\n")
    for words in ("12.5 s", "runs/first/model", "train.max_steps=40 checkpoint.allow_changes=true"):
        assert words in said
    moved = changed("run", dir="runs/first one")
    shutil.copytree("runs/first", moved.run.dir)
    Path(moved.run.dir, "config.yaml").write_text(to_yaml(moved))
    assert "hfdist report 'runs/first one'" in describe_finished(moved)


def test_the_limit_that_ended_it_is_the_one_to_raise():
    by_epochs = replace(changed("train", max_steps=None, epochs=2), optimizer=replace(CONFIG.optimizer))
    by_epochs.optimizer.schedule = Schedule.constant
    end(by_epochs)
    assert "the same command with train.epochs=4\n" in describe_finished(by_epochs)


@pytest.mark.parametrize(
    ("section", "values", "is_done"),
    [
        ("launch", {"processes": "2"}, True),
        ("strategy", {"sharding": "zero2"}, True),
        ("train", {"micro_batch_size": 1, "max_hours": 3.0}, True),
        ("checkpoint", {"allow_changes": True}, True),
        ("train", {"max_steps": 21}, False),
        ("train", {"max_steps": 19}, False),
        ("train", {"epochs": 1}, False),
        ("optimizer", {"lr": 1.0}, False),
        ("export", {"push_to": "me/mine"}, False),
        ("checkpoint", {"resume": "never"}, False),
        ("report", {"sample_prompt": "Once"}, False),
        ("run", {"name": "second"}, False),
    ],
)
def test_what_is_asked_for_decides_whether_something_is_left(section, values, is_done):
    # With a constant rate, another length is a safe change.
    before, after = to_values(changed("optimizer", schedule=Schedule.constant)), to_values(CONFIG)
    after["optimizer"]["schedule"] = before["optimizer"]["schedule"]
    after[section] |= values
    assert leaves_all_done(find_changes(before, after)) == is_done


def test_a_change_that_no_step_would_have_is_refused():
    """The run's folder would say what was not done."""
    end()
    other = changed("optimizer", lr=1.0)
    assert describe_finished(other) is None, "the checkpoint refuses it"
    allowed = replace(other, checkpoint=replace(CONFIG.checkpoint, allow_changes=True))
    with pytest.raises(ConfigError, match="no step is left") as caught:
        describe_finished(allowed)
    assert "train.max_steps=40 checkpoint.allow_changes=true" in caught.value.hint
    assert describe_finished(replace(allowed, train=replace(CONFIG.train, max_steps=40))) is None


@pytest.mark.parametrize(
    "of_record",
    [{"state": "failed", "exit_code": 7}, {"state": "stopped"}, {"state": "running"}, {"step": 19}, {"max_steps": "20"},
     {"max_steps": None}],
)  # fmt: skip
def test_a_run_whose_record_does_not_say_so_goes_on(of_record):
    end(**of_record)
    assert describe_finished(CONFIG) is None


@pytest.mark.parametrize("name", ["checkpoints", "model", "config.yaml", "run.json"])
def test_a_run_that_has_lost_something_goes_on(name):
    folder = end()
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    assert describe_finished(CONFIG) is None


def test_of_an_adapter_its_own_folder_counts():
    end()
    shutil.rmtree("runs/first/adapter")
    assert describe_finished(replace(CONFIG, adapter=AdapterConfig(type="lora", merge=False))) is None


def test_a_config_that_refers_to_the_environment_is_not_read():
    (end() / "config.yaml").write_text("run:\n  name: ${oc.env:HOME}\n")
    assert describe_finished(CONFIG) is None


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_rank_0_says_it_and_nothing_starts(rank, said, monkeypatch, capsys):
    end()
    monkeypatch.setattr("sys.argv", ["recipe", *COMMAND, "strategy=ddp"])
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    recipe()(lambda config: pytest.fail("it trains"))()
    assert capsys.readouterr().err.count("nothing left to train") == said


def test_ranks_that_may_be_on_other_machines_go_on(monkeypatch):
    """Not all launchers say how many processes a machine has, and each rank may see another folder."""
    end()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert not _says_finished(CONFIG)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _says_finished(CONFIG)
    assert not _says_finished(replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, resume="never")))
