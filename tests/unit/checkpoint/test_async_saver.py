"""A save beside the training: it holds what was there when it began, there is one at a time, and failures are heard."""

import atexit
import errno
import os
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hfdist.checkpoint import Keep, Saver, find_newest, host_copy, read_checkpoint, verify, write
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.piece import WEIGHT
from hfdist.errors import CheckpointError, NumericsError, ResourceError
from hfdist.testing import run_ranks
from tests.unit.checkpoint.pieces import blank, small_pieces, whole

ONE = Keep(newest=1)


def begin(saver, folder, step, pieces, write=lambda path: (path / "config.json").write_text("{}")):
    saver.save(
        folder / step_name(step),
        step=step,
        pieces=pieces,
        state={"step": step},
        write_files=lambda folder, is_replica: write(folder),
        keep=ONE,
        begin_seconds=time.monotonic(),
    )


@pytest.fixture
def gate():
    """Writes model files once it is opened."""

    class Gate(threading.Event):
        def write(self, path):
            assert self.wait(20)

    return Gate()


def test_what_changes_after_the_copy_is_not_saved(tmp_path, gate):
    saver, pieces = Saver(), small_pieces(3)
    begin(saver, tmp_path, 1, pieces, gate.write)
    for piece in pieces:
        piece.view.fill_(-5)
    assert find_newest(tmp_path) is None
    assert saver.is_busy
    gate.set()
    saver.wait()
    verify(tmp_path / "step-00000001")
    loaded = blank(small_pieces())
    assert read_checkpoint(tmp_path / "step-00000001", loaded) == {"step": 1}
    assert all(torch.equal(a.view, b.view) for a, b in zip(loaded, small_pieces(3), strict=True))
    (report,) = saver.take_reports()
    assert (report.path, report.step) == (tmp_path / "step-00000001", 1)
    assert report.num_bytes == sum(
        (report.path / name).stat().st_size
        for name in ("model.safetensors", "training_state/optimizer-00001-of-00001.safetensors")
    )
    assert 0 < report.stall_seconds < report.total_seconds
    assert saver.take_reports() == []


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_memory_for_the_first_save_is_made_beforehand_where_there_is_enough(tmp_path, monkeypatch, gate, error):
    allocate, calls = host_copy._allocate, []

    def noted(layout):
        calls.append(threading.current_thread().name)
        assert gate.wait(20)
        if len(calls) == 1:
            raise error
        return allocate(layout)

    monkeypatch.setattr(host_copy, "_allocate", noted)
    saver = Saver()
    saver.prepare(small_pieces())
    # It is no save, for which a replica would be left out.
    assert not saver.is_busy
    gate.set()
    saver.wait()
    assert saver._thread.is_alive()
    saver.prepare(small_pieces())
    begin(saver, tmp_path, 1, small_pieces(1))
    saver.wait()
    # The first try has found too little, and the save has used what the second has made.
    assert calls == ["save", "save"]
    assert not saver.is_busy
    loaded = blank(small_pieces())
    read_checkpoint(tmp_path / "step-00000001", loaded)
    assert all(torch.equal(a.view, b.view) for a, b in zip(loaded, small_pieces(1), strict=True))


def test_memory_that_is_made_while_training_stands_still_is_written_once():
    live = [torch.ones(1000)]
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        host_copy.HostCopy().take(live)
    called = {event.key for event in ran.key_averages()}
    assert "aten::copy_" in called
    assert not called & {"aten::zero_", "aten::fill_"}


def test_there_is_one_save_at_a_time_and_the_oldest_goes_last(tmp_path, gate):
    saver = Saver()
    begin(saver, tmp_path, 1, small_pieces(1), gate.write)
    threading.Timer(0.2, gate.set).start()
    begin(saver, tmp_path, 2, small_pieces(2))
    assert gate.is_set()
    assert (tmp_path / "step-00000001").is_dir()
    saver.wait()
    assert os.listdir(tmp_path) == ["step-00000002"]
    first, second = saver.take_reports()
    assert (first.step, second.step) == (1, 2)
    assert second.stall_seconds >= 0.1


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "bytes needed, "),
        (OSError(errno.EIO, "Input/output error"), CheckpointError, "Input/output error"),
    ],
)
def test_a_failure_is_heard_and_harms_nothing(tmp_path, monkeypatch, error, kind, message):
    saver = Saver()
    begin(saver, tmp_path, 1, small_pieces(1))
    saver.wait()

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        begin(saver, tmp_path, 2, small_pieces(2))
        saver._is_done.wait()
        assert saver.has_failed
        with pytest.raises(kind, match=message) as caught:
            saver.wait()
        assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == ["step-00000001"]
    verify(tmp_path / "step-00000001")
    assert not saver.has_failed
    begin(saver, tmp_path, 3, small_pieces(3))
    saver.wait()
    assert os.listdir(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize(
    ("in_background", "key", "value"), [(True, 0, "nan"), (False, 1, "-inf"), (True, 1, "inf"), (False, 0, "nan")]
)
def test_what_is_trained_and_not_finite_is_not_saved(tmp_path, in_background, key, value):
    saver, pieces = Saver(in_background=in_background), small_pieces()
    pieces[3].view[0] = -torch.inf  # not trained
    begin(saver, tmp_path, 1, pieces)
    saver.wait()
    verify(tmp_path / "step-00000001")
    pieces[key].view[1, 2] = float(value)
    with pytest.raises(NumericsError, match=f"a/{pieces[key].key}"):
        begin(saver, tmp_path, 2, pieces)
        saver.wait()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_parameter_that_comes_later_is_saved_too(tmp_path):
    saver, pieces = Saver(), small_pieces(2)
    begin(saver, tmp_path, 1, pieces[:2] + pieces[3:])
    pieces[2].view.fill_(9)
    begin(saver, tmp_path, 2, pieces)
    begin(saver, tmp_path, 3, pieces)
    saver.wait()
    loaded = blank(pieces)
    read_checkpoint(tmp_path / "step-00000003", loaded)
    assert all(torch.equal(a.view, b.view) for a, b in zip(loaded, pieces, strict=True))


def test_what_must_come_first_is_written_beside_the_training_and_its_failure_is_heard(tmp_path):
    entered, go_on = threading.Event(), threading.Event()

    def write_first():
        entered.set()
        assert go_on.wait(20)
        raise OSError(errno.EIO, "Input/output error", "the ledger")

    saver = Saver(write_first=write_first)
    begin(saver, tmp_path, 1, small_pieces())
    assert entered.wait(20)
    assert find_newest(tmp_path) is None
    go_on.set()
    with pytest.raises(CheckpointError, match="the ledger"):
        saver.wait()
    assert os.listdir(tmp_path) == []


def test_an_exit_within_a_save_ends_no_later_save(tmp_path):
    calls = []

    def write_first():
        calls.append(1)
        if len(calls) == 1:
            raise SystemExit("enough")

    saver = Saver(write_first=write_first)
    begin(saver, tmp_path, 1, small_pieces())
    with pytest.raises(SystemExit, match="enough"):
        saver.wait()
    begin(saver, tmp_path, 2, small_pieces())
    assert saver._is_done.wait(20)
    saver.wait()
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_one_thread_does_all_saves_and_ends_with_the_saver(tmp_path):
    """The memory of a new thread for each save stays with the process."""
    threads = []
    saver = Saver()
    for step in range(1, 5):
        begin(saver, tmp_path, step, small_pieces(step), lambda path: threads.append(threading.current_thread()))
    saver.wait()
    (thread,) = set(threads)
    assert thread.is_alive()
    del saver
    thread.join(20)
    assert not thread.is_alive()


def fail_during_a_save(folder):
    """Let the process end as it does after an error."""
    saver = Saver()
    begin(saver, folder, 1, small_pieces(), lambda path: time.sleep(0.5))
    atexit._run_exitfuncs()


def test_a_process_that_fails_during_a_save_lets_it_end(tmp_path):
    """Python would end the thread in the middle of torch's C++, and that the process."""
    run_ranks(fail_during_a_save, 1, tmp_path, group=False)
    verify(tmp_path / "step-00000001")


def test_what_is_written_goes_to_the_disk_without_a_gap(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(write, "FLUSH_BYTES", 100)
    monkeypatch.setattr(write, "CHUNK_BYTES", 40)
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, begin, length, advice: sent.append((begin, length)))
    pieces = [whole("w", WEIGHT, torch.arange(100.0))]
    saver = Saver()
    begin(saver, tmp_path, 1, pieces)
    saver.wait()
    first = sent[0][0]
    assert sent == [(first, 120), (first + 120, 120), (first + 240, 120)]
