"""What a start takes from the mirror, and what it says where there is none; how long the end waits, and for what."""

import json
import logging
import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.mirror import Objects, packs
from hfdist.checkpoint.mirror.listed import Content, ListedCheckpoint
from hfdist.config.composition.compose import compose_config
from hfdist.errors import CheckpointError, ResourceError
from hfdist.records import RunFolder
from hfdist.records.lines import earlier
from hfdist.run.parts import mirror as of_part
from hfdist.run.parts.mirror import MirrorPart
from hfdist.trainer.fault_tolerance.preemption import Preemption
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
        config=config,
        preemption=Preemption(),
        uploader=None,
        recorder=None,
        trainer=SimpleNamespace(checkpointer=SimpleNamespace(log=SimpleNamespace(add_uploads=lambda: None))),
    )


class Failing(Objects):
    """A store that fails so many times to write."""

    num_failures = 0

    def write(self, contents):
        if self.num_failures:
            self.num_failures -= 1
            raise ResourceError("the mirror cannot be written: HTTP 503, after 6 attempts", where=self.shown)
        super().write(contents)


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


def test_records_come_with_a_checkpoint_in_place_of_those_of_an_older_one(tmp_path):
    first = open_part(run_of(tmp_path))
    folder = first.config.run.folder
    for step in (1, 2):
        folder.ledger.mkdir(parents=True, exist_ok=True)
        for path, line in ((folder.metrics, f'{{"step": {step}}}\n'), (folder.ledger / "lane-00000.records", "xyz")):
            with path.open("a") as file:
                file.write(line)
        (folder.ledger / "lane-00000.records.abcd.tmp").write_text("not finished")
        folder.config.write_text("not sent")
        first.uploader.put(save(tmp_path / "run/checkpoints", step))
        assert first.uploader.wait(60)
        if step == 1:
            shutil.copytree(tmp_path / "run", tmp_path / "older")
    records = {"metrics.jsonl": b'{"step": 1}\n{"step": 2}\n', "ledger/lane-00000.records": b"xyzxyz"}
    for name in ("empty", "older"):
        with (tmp_path / "older/metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "of": "another branch"}\n')
        other = RunFolder(tmp_path / name)
        # A start that was killed once it had the checkpoint leaves the rest to the next one.
        for _ in range(2):
            open_part(run_of(tmp_path, f"run.dir={other.path}"))
            found = files_of(other.path)
            assert found.items() >= records.items()
            assert not [name for name in found if "tmp" in name and not name.startswith("ledger.earlier")]
            shutil.rmtree(other.ledger)
    assert len(earlier(other.metrics).read_text().splitlines()) >= 2
    assert files_of(earlier(other.ledger))["lane-00000.records"] == b"xyz"


def train(run, step):
    """Add to the records of a run, and upload a checkpoint."""
    folder = run.config.run.folder
    folder.ledger.mkdir(parents=True, exist_ok=True)
    for path, line in ((folder.metrics, f'{{"step": {step}}}\n'), (folder.ledger / "lane-00000.records", f"<{step}>")):
        with path.open("a") as file:
            file.write(line)
    run.uploader.put(save(folder.checkpoints, step))
    assert run.uploader.wait(60)


def records_of(path):
    folder = RunFolder(path)
    return folder.metrics.read_text(), (folder.ledger / "lane-00000.records").read_text()


def test_a_start_that_is_killed_before_the_records_come_leaves_them_to_the_next(tmp_path):
    """Also where the folder has those of an older checkpoint."""
    first = open_part(run_of(tmp_path))
    train(first, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    train(first, 2)
    older = run_of(tmp_path, f"run.dir={tmp_path}/older")
    if (child := os.fork()) == 0:
        of_part._bring_records = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        open_part(older)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert records_of(tmp_path / "older")[1] == "<1>"
    assert (tmp_path / "older/checkpoints" / step_name(2)).is_dir()
    again = open_part(older)
    assert records_of(tmp_path / "older") == records_of(tmp_path / "run")
    # And once only: what the run adds from here on stays.
    train(again, 3)
    open_part(run_of(tmp_path, f"run.dir={tmp_path}/older"))
    assert records_of(tmp_path / "older")[1] == "<1><2><3>"


def test_disks_are_lost_again_and_again(tmp_path):
    """After an upload of what came, and before it."""
    whole, step = ("", ""), 0
    for number in range(4):
        run = open_part(run_of(tmp_path, f"run.dir={tmp_path}/disk-{number}"))
        if number:
            assert records_of(run.config.run.folder.path) == whole
            assert [path.name for path in run.config.run.folder.checkpoints.iterdir()] == [step_name(step)]
        for _ in range(2 if number != 1 else 0):
            step += 1
            train(run, step)
        whole = records_of(run.config.run.folder.path)
        shutil.rmtree(run.config.run.folder.path)
    assert whole[1] == "".join(f"<{one}>" for one in range(1, 7))


@pytest.mark.parametrize(
    "names",
    [
        ["config.yaml"],
        ["ledger/../../out"],
        [f"checkpoints/{step_name(1)}/weights"],
        ["ledger/lane-00000.records/below"],
        ["ledger/own.py"],
        ["metrics.jsonl", "metrics.jsonl"],
        [f"ledger/lane-{number}" for number in range(6)],
    ],
)
def test_records_that_are_none_stay_out(names, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(packs, "_MOST_FILES", 5)
    first = open_part(run_of(tmp_path))
    train(first, 1)
    objects, name = Objects(f"file://{tmp_path}/mirror/own"), f"{step_name(1)}.json"
    listed = ListedCheckpoint.from_bytes(objects.read(name, objects.list()[name]), "")
    pack = json.dumps([[one, 0, 1] for one in names]).encode() + b"\n" + b"x" * len(names)
    forged = replace(listed, packs=[*listed.packs, Content.of(pack)])
    objects.write({forged.packs[-1].name: pack, name: forged.to_bytes()})
    before = files_of(tmp_path)
    open_part(run_of(tmp_path, f"run.dir={tmp_path}/elsewhere"))
    assert "goes on without the records" in caplog.text
    came = {name: data for name, data in files_of(tmp_path).items() if name not in before}
    assert came
    assert all(name.startswith(f"elsewhere/checkpoints/{step_name(1)}/") for name in came)
    assert files_of(tmp_path).items() >= {key: value for key, value in before.items() if "writer" not in key}.items()


def test_a_start_from_an_earlier_step_is_refused_before_a_later_one_comes(tmp_path):
    first = open_part(run_of(tmp_path))
    for step in (1, 2):
        first.uploader.put(save(tmp_path / "run/checkpoints", step))
        assert first.uploader.wait(60)
    resume = f"checkpoint.resume={tmp_path}/run/checkpoints/{step_name(1)}"
    shutil.rmtree(tmp_path / "run/checkpoints" / step_name(2))
    with pytest.raises(CheckpointError, match="the mirror holds later checkpoints"):
        open_part(run_of(tmp_path, resume))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [step_name(1)]
    # As the hint says.
    (tmp_path / f"mirror/own/{step_name(2)}.json").unlink()
    assert open_part(run_of(tmp_path, resume)).uploader.newest_step == 1


def test_the_best_of_the_mirror_comes_where_it_is_kept(tmp_path):
    best = ("checkpoint.keep_best=true", "checkpoint.keep=1", "checkpoint.every=1", "train.eval_every=1")
    first = open_part(run_of(tmp_path, *best))
    for step, loss in ((1, 1.0), (2, 2.0)):
        first.uploader.put(save(tmp_path / "run/checkpoints", step, state={"held_out_loss": loss}))
        assert first.uploader.wait(60)
    for overrides, steps in (((), [2]), (best, [1, 2])):
        folder = tmp_path / f"elsewhere-{len(steps)}"
        open_part(run_of(tmp_path, f"run.dir={folder}", *overrides))
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == list(map(step_name, steps))


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


def test_the_end_tries_the_last_upload_again(tmp_path, caplog):
    run = open_part(run_of(tmp_path))
    store = run.uploader.mirror._objects = Failing(f"file://{tmp_path}/mirror/own")
    path = save(tmp_path / "run/checkpoints", 3)
    for num_failures, has_it in ((2, True), (9, False)):
        shutil.rmtree(tmp_path / "mirror")
        run.uploader.newest_step, store.num_failures = None, num_failures
        run.uploader.put(path)
        MirrorPart().finish(run)
        assert (run.uploader.newest_step == 3) == has_it
        assert (tmp_path / f"mirror/own/{step_name(3)}.json").exists() == has_it
    assert store.num_failures == 9 - 1 - 3
    assert caplog.messages[-1].startswith(f"the mirror lacks {path}")


def test_another_signal_ends_the_wait_and_not_the_process(tmp_path, caplog, monkeypatch):
    run = open_part(run_of(tmp_path))
    store = run.uploader.mirror._objects = Gate(f"file://{tmp_path}/mirror/own")
    path = save(tmp_path / "run/checkpoints", 3)
    run.uploader.put(path)
    monkeypatch.setattr(of_part.logger, "info", lambda *words: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with run.preemption.hearing_again():
        MirrorPart().stop(run)
    assert signal.getsignal(signal.SIGTERM) is before
    assert caplog.messages == [f"the mirror lacks {path}, and has no checkpoint"]
    store.is_open.set()
    assert run.uploader.wait(60)


def test_a_run_without_a_mirror_has_none(tmp_path):
    run = run_of(tmp_path, "checkpoint.mirror=null")
    open_part(run)
    MirrorPart().finish(run)
    assert run.uploader is None
