"""What a start takes from the mirror, and what it says where there is none; how long the end waits, and for what."""

import logging
from types import SimpleNamespace

import pytest

from hfdist.checkpoint.folder import step_name
from hfdist.config.composition.compose import compose_config
from hfdist.errors import CheckpointError, ResourceError
from hfdist.run.parts.mirror import MirrorPart
from tests.unit.checkpoint.pieces import files_of, save
from tests.unit.checkpoint.test_mirror import Gate
from tests.unit.data.servers import s3, s3_server

__all__ = ["s3", "s3_server"]


def run_of(tmp_path, *overrides, mirror="file://{}/mirror"):
    config = compose_config(
        [
            "model=tiny",
            f"checkpoint.mirror={mirror.format(tmp_path)}",
            "run.name=own",
            f"run.dir={tmp_path}/run",
            *overrides,
        ]
    )
    return SimpleNamespace(
        config=config, uploader=None, trainer=SimpleNamespace(checkpointer=SimpleNamespace(report_uploads=lambda: None))
    )


def open_part(run):
    MirrorPart().open(run)
    return run


def test_an_empty_disk_gets_the_newest_and_a_folder_keeps_its_own(tmp_path):
    first = open_part(run_of(tmp_path))
    assert first.uploader.newest_step is None
    for step in (1, 2):
        first.uploader.put(save(tmp_path / "run/checkpoints", step))
        assert first.uploader.wait(60)
    before = files_of(tmp_path / "run")
    assert open_part(run_of(tmp_path)).uploader.newest_step == 2
    assert files_of(tmp_path / "run") == before
    other = open_part(run_of(tmp_path, f"run.dir={tmp_path}/elsewhere"))
    assert other.uploader.newest_step == 2
    newest = f"checkpoints/{step_name(2)}/"
    assert files_of(tmp_path / "elsewhere") == {name: data for name, data in before.items() if name.startswith(newest)}
    # Another run has another folder there.
    open_part(run_of(tmp_path, "run.name=another", f"run.dir={tmp_path}/third"))
    assert not (tmp_path / "third/checkpoints").exists()
    with pytest.raises(CheckpointError, match="the mirror already holds checkpoints"):
        open_part(run_of(tmp_path, "checkpoint.resume=never", f"run.dir={tmp_path}/fourth"))


def test_a_mirror_without_an_answer_ends_a_start_that_has_nothing_else(s3, tmp_path, caplog):
    with pytest.raises(ResourceError, match="HTTP 404") as caught:
        open_part(run_of(tmp_path, mirror="s3://nowhere/runs"))
    assert "checkpoint.mirror=null" in caught.value.hint
    save(tmp_path / "run/checkpoints", 1)
    with caplog.at_level(logging.WARNING, "hfdist"):
        run = open_part(run_of(tmp_path, mirror="s3://nowhere/runs"))
    assert "the run goes on from its folder" in caplog.text
    assert run.uploader.newest_step is None


@pytest.mark.parametrize("hook", ["stop", "finish"])
def test_the_end_waits_as_long_as_it_is_told_and_says_what_is_missing(hook, tmp_path, caplog):
    run = open_part(run_of(tmp_path, "checkpoint.mirror_minutes=0.005"))
    store = run.uploader.mirror._objects = Gate(f"file://{tmp_path}/mirror/own")
    path = save(tmp_path / "run/checkpoints", 3)
    run.uploader.put(path)
    with caplog.at_level(logging.INFO, "hfdist"):
        getattr(MirrorPart(), hook)(run)
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("waiting for the mirror")
    assert told[-1] == f"the mirror lacks {path} after checkpoint.mirror_minutes=0.005, and has no checkpoint"
    store.is_open.set()
    assert run.uploader.wait(60)
    caplog.clear()
    getattr(MirrorPart(), hook)(run)
    assert not caplog.records


def test_a_run_without_a_mirror_has_none(tmp_path):
    run = run_of(tmp_path, "checkpoint.mirror=null")
    open_part(run)
    MirrorPart().finish(run)
    assert run.uploader is None
