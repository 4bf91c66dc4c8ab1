"""A run folder has one run at a time: on one machine at once, between machines by the beat; the dead hold nothing."""

import json
import os
import signal
import threading
import time
from multiprocessing import get_context

import pytest

from hfdist.errors import ConfigError
from hfdist.records import RunFolder
from hfdist.records.run_lock import RunLock

QUICK = {"beat_seconds": 0.05, "silent_seconds": 0.5, "dying_seconds": 0.5}


def hold(folder, taken, more):
    RunLock(folder, **QUICK)
    if more == "with a child" and os.fork() == 0:
        # As a loader process that outlives its rank.
        time.sleep(3)
        os._exit(0)
    taken.set()
    time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Gives a process that holds the folder."""
    started = []

    def start(more=""):
        context = get_context("fork")
        taken = context.Event()
        process = context.Process(target=hold, args=(tmp_path, taken, more))
        process.start()
        assert taken.wait(20)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_second_run_is_refused_and_told_who_holds_it(tmp_path, holder):
    process = holder()
    with pytest.raises(ConfigError) as caught:
        RunLock(tmp_path, **QUICK)
    assert f"held by process {process.pid} on " in caught.value.found
    assert process.is_alive()


@pytest.mark.parametrize("more", ["", "with a child"])
def test_what_a_killed_run_held_is_free_at_once(tmp_path, holder, more):
    process = holder(more)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    RunLock(tmp_path, **QUICK).release()
    assert time.monotonic() - began < QUICK["silent_seconds"]


def test_a_holder_that_is_just_ending_is_waited_for(tmp_path, holder):
    process = holder()
    threading.Timer(0.5, process.kill).start()
    RunLock(tmp_path, **{**QUICK, "dying_seconds": 20.0}).release()


def test_a_released_folder_says_nothing_of_its_holder(tmp_path):
    RunLock(tmp_path, **QUICK).release()
    assert RunFolder(tmp_path).lock.read_bytes() == b""


def test_a_beat_under_way_is_waited_for(tmp_path, monkeypatch):
    begun, may_end, order = threading.Event(), threading.Event(), []

    def write(descriptor, content, offset):
        if threading.current_thread().name == "run-lock":
            begun.set()
            may_end.wait(20)
            order.append("beat")

    lock = RunLock(tmp_path, **QUICK)
    monkeypatch.setattr(os, "pwrite", write)
    assert begun.wait(20)
    threading.Timer(0.2, may_end.set).start()
    lock.release()
    order.append("released")
    # By then another file may have the number of the descriptor.
    assert may_end.wait(20)
    assert order == ["beat", "released"]


def write_beat(folder, beat):
    RunFolder(folder).lock.write_text(json.dumps({"host": "another-machine", "pid": 7, "beat": beat}))


def test_another_machine_that_goes_on_keeps_it(tmp_path):
    write_beat(tmp_path, 0)
    beat = threading.Timer(0.2, write_beat, (tmp_path, 1))
    beat.start()
    with pytest.raises(ConfigError, match="held by process 7 on another-machine"):
        RunLock(tmp_path, **QUICK)
    beat.join()


def test_another_machine_that_is_silent_has_lost_it(tmp_path, caplog):
    write_beat(tmp_path, 0)
    RunLock(tmp_path, **QUICK).release()
    assert "was held by another-machine" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", "\0" * 100])
def test_a_damaged_file_holds_nothing(tmp_path, content):
    RunFolder(tmp_path).lock.write_text(content)
    RunLock(tmp_path, **QUICK).release()
