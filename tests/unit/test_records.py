"""run.json and events.jsonl say how each start of a run stands, or how it ended, whoever sees the end."""

import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from hfdist.config.cli import command
from hfdist.config.composition.compose import compose_config
from hfdist.errors import DataError, PeerError, PreemptedError, ResourceError
from hfdist.records import (
    Event,
    RankColumn,
    RunFolder,
    RunRecord,
    RunRecorder,
    State,
    read_lines,
    read_run,
    record_ranks,
    recording_end,
)
from hfdist.records.lines import append_line
from hfdist.records.run_end import record_end_of_peer
from hfdist.trainer.fault_tolerance.preemption import Preemption


@pytest.fixture(autouse=True)
def _no_run(monkeypatch):
    monkeypatch.setattr(RunRecorder, "of_process", None)


def begin(folder):
    return RunRecorder(folder, {"shard": 2, "sharding": "zero1"}, 2)


def events(folder):
    return [(line["start"], line["event"], line.get("state")) for line in read_lines(RunFolder(folder).events)]


@pytest.mark.parametrize(
    ("error", "state", "exit_code", "said"),
    [
        (None, State.finished, 0, None),
        (DataError("a row is bad", where="a.jsonl:3"), State.failed, 3, "a row is bad: a.jsonl:3"),
        (PreemptedError("it was told to stop"), State.stopped, 75, "it was told to stop"),
        (KeyboardInterrupt(), State.failed, 130, "interrupted"),
        (ValueError("a bug\nin two lines"), State.failed, 1, "ValueError: a bug"),
        (OSError("password=abc"), State.failed, 1, "OSError: password=***"),
        (SystemExit(7), State.failed, 7, "a rank has ended with exit code 7"),
        (SystemExit("no such file"), State.failed, 1, "no such file"),
        (SystemExit(""), State.failed, 1, ""),
        (SystemExit(["a", 2]), State.failed, 1, "['a', 2]"),
        (SystemExit(), State.finished, 0, None),
    ],
)
def test_the_end_of_a_run(tmp_path, error, state, exit_code, said):
    with suppress(BaseException), recording_end():
        recorder = begin(tmp_path)
        recorder.record.step = 5
        if error is not None:
            raise error
    record = read_run(tmp_path)
    assert (record.state, record.exit_code, record.error, record.step) == (state, exit_code, said, 5)
    assert events(tmp_path) == [(1, "start", None), (1, "end", state.value)]
    # What sees the end later changes nothing.
    recorder.end(6)
    record_end_of_peer(tmp_path, 1, 6, "late")
    assert read_run(tmp_path) == record


def test_a_second_start_goes_on_and_tells_how_the_first_was_lost(tmp_path):
    first = begin(tmp_path)
    RunRecorder.of_process = None  # killed
    (tmp_path / "run.json.a1b2c3d4.tmp").touch()
    first._begun_seconds -= 10
    first.step_done(3)
    first.record.tokens = 30
    first.write()
    known = read_run(tmp_path).updated
    time.sleep(0.01)
    second = begin(tmp_path).record
    assert [line["time"] for line in read_lines(RunFolder(tmp_path).events)][1] == known
    assert (second.start, second.step, second.tokens) == (2, 0, 0)
    assert second.earlier_seconds == first.record.seconds >= 10
    assert events(tmp_path) == [(1, "start", None), (1, "end", "lost"), (2, "start", None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "run.json"]


def test_a_process_that_does_one_run_after_the_other_ends_the_first(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        begin(tmp_path / name)
    assert read_run(tmp_path / "first").state is State.finished
    assert read_run(tmp_path / "second").state is State.running


def test_the_end_is_written_into_the_folder_of_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = begin(Path())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    recorder.end(0)
    assert read_run(tmp_path).state is State.finished


def test_steps_are_written_now_and_then(tmp_path, monkeypatch):
    recorder = begin(tmp_path)
    recorder.step_done(1)
    assert read_run(tmp_path).step == 0
    monkeypatch.setattr("hfdist.records.recorder._WRITE_SECONDS", 0.0)
    recorder.step_done(2)
    assert read_run(tmp_path).step == 2


def test_another_rank_writes_the_end_of_its_own_start_alone(tmp_path):
    begin(tmp_path)
    record_end_of_peer(tmp_path, 2, 6, "it was killed")
    assert read_run(tmp_path).state is State.running
    record_end_of_peer(tmp_path, 1, 6, "it was killed")
    assert (read_run(tmp_path).exit_code, read_run(tmp_path).error) == (6, "it was killed")


def rank_0(folder, exit_code=None):
    """As this process would have started it: it is killed, or ends."""
    recorder = begin(folder)
    recorder.record.launcher_pid = os.getpid()
    recorder.write()
    if exit_code is not None:
        recorder.end(exit_code, "the connection to another rank is lost")
    RunRecorder.of_process = None


@pytest.mark.parametrize(
    ("own", "exit_code", "said", "num_ends"),
    [
        (None, 143, "ended by SIGTERM", 1),
        (None, 128 + 40, "ended by signal 40", 1),
        (None, 3, "a rank has ended with exit code 3", 1),
        (None, 0, None, 1),
        # It met only what followed.
        (6, 3, "a rank has ended with exit code 3", 2),
        (3, 3, "the connection to another rank is lost", 1),
    ],
)
def test_what_starts_ranks_knows_the_exit_code(tmp_path, own, exit_code, said, num_ends):
    def do_run():
        rank_0(tmp_path, own)
        return exit_code

    assert record_ranks(tmp_path, do_run) == exit_code
    record = read_run(tmp_path)
    assert (record.exit_code, record.error, record.state) == (exit_code, said, State.of(exit_code))
    assert [name for _, name, _ in events(tmp_path)] == ["start", *["end"] * num_ends]


def test_the_record_of_an_earlier_start_stays(tmp_path):
    """Its launcher had the same process number, and the ranks fail before they hold the folder."""
    rank_0(tmp_path)
    before = read_run(tmp_path)
    record_ranks(tmp_path, lambda: 2)
    assert read_run(tmp_path) == before


def test_a_second_signal_is_written_before_it_ends_the_process(tmp_path, monkeypatch):
    begin(tmp_path)
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    preemption = Preemption()
    preemption._receive(signal.SIGTERM, None)
    assert read_run(tmp_path).state is State.running
    preemption._received_seconds -= 10
    preemption._receive(signal.SIGTERM, None)
    assert (read_run(tmp_path).exit_code, read_run(tmp_path).error) == (143, "ended by SIGTERM")


NO_RECORDS = ("", "{", "[]", "3", "\0", '{"schema": 99}', '{"schema": 1, "start": 1, "state": "odd"}',
              '{"schema": 1, "start": null, "state": "running"}')  # fmt: skip


@pytest.mark.parametrize("content", NO_RECORDS)
def test_what_is_no_record_is_none_and_a_run_begins_anew(tmp_path, content):
    RunFolder(tmp_path).record.write_text(content)
    assert read_run(tmp_path) is None
    assert begin(tmp_path).record.start == 1


def test_fields_of_later_versions_are_passed_over(tmp_path):
    content = begin(tmp_path).record.to_json() | {"new": 1}
    RunFolder(tmp_path).record.write_text(json.dumps(content))
    assert read_run(tmp_path).start == 1


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_no_step_and_is_no_second_error_at_the_end(tmp_path, monkeypatch, caplog):
    recorder = begin(tmp_path)
    monkeypatch.setattr("hfdist.records.recorder._WRITE_SECONDS", 0.0)
    monkeypatch.setattr("pathlib.Path.open", full)
    monkeypatch.setattr("tempfile.mkstemp", full)
    for step in (1, 2):
        recorder.step_done(step)
    assert caplog.text.count("run.json is not up to date") == 1
    recorder.end(0)
    with pytest.raises(ResourceError, match="cannot be written"):
        recorder.add(Event.skip, step=2)


def test_an_event_after_a_line_that_was_cut_off_is_no_part_of_it(tmp_path):
    recorder = begin(tmp_path)
    with RunFolder(tmp_path).events.open("a") as file:
        file.write('{"time": "2026-')
    recorder.end(0)
    assert events(tmp_path) == [(1, "start", None), (1, "end", "finished")]


def test_the_command_that_starts_ranks_tells_that_they_were_killed(tmp_path, monkeypatch):
    def start_ranks(*_, **__):
        rank_0(tmp_path)
        raise PeerError("a process was ended by SIGKILL, and with it the run")

    monkeypatch.setattr("hfdist.launch.launch.start_ranks", start_ranks)
    config = compose_config(["model=tiny", f"run.dir={tmp_path}", "launch.processes=2"])
    with pytest.raises(PeerError):
        command._start_ranks(sys.exit, config, 2)
    record = read_run(tmp_path)
    assert (record.state, record.exit_code) == (State.failed, 6)
    assert record.error == "a process was ended by SIGKILL, and with it the run"


def test_events_have_a_time_and_their_fields(tmp_path):
    begin(tmp_path).add(Event.save, step=2, bytes=10)
    line = read_lines(RunFolder(tmp_path).events)[-1]
    assert line["time"].endswith("+00:00")
    assert {name: line[name] for name in ("start", "event", "step", "bytes")} == {
        "start": 1, "event": "save", "step": 2, "bytes": 10
    }  # fmt: skip


def test_lines_take_numbers_of_other_libraries_and_those_that_are_not_finite(tmp_path):
    figures = {"eval_f1": np.float32(0.5), "tensor": torch.tensor(3), "by_rank": [1.0, math.nan], "of": {"a": np.inf}}
    append_line(tmp_path / "lines.jsonl", figures)
    assert read_lines(tmp_path / "lines.jsonl") == [
        {"eval_f1": 0.5, "tensor": 3, "by_rank": [1.0, None], "of": {"a": None}}
    ]


def test_the_page_names_each_field_and_each_event():
    page = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(RunRecord)] + [one.value for one in (*State, *Event, *RankColumn)]
    assert [name for name in names if f"`{name}`" not in page] == []
