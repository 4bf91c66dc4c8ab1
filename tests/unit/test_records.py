"""run.json and events.jsonl say how each start of a run stands, or how it ended, whoever sees the end."""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from hfdist.config.cli import command
from hfdist.config.composition.compose import compose_config
from hfdist.errors import DataError, PeerError, PreemptedError
from hfdist.records import (
    EVENTS,
    RUN_FILE,
    Event,
    RunRecord,
    RunRecorder,
    State,
    end_run,
    read_lines,
    read_run,
    recording_end,
)


@pytest.fixture(autouse=True)
def _no_run(monkeypatch):
    monkeypatch.setattr(RunRecorder, "of_process", None)


def begin(folder):
    return RunRecorder(folder, {"shard": 2, "sharding": "zero1"}, 2)


def events(folder):
    return [(line["start"], line["event"], line.get("state")) for line in read_lines(folder / EVENTS)]


@pytest.mark.parametrize(
    ("error", "state", "exit_code", "said"),
    [
        (None, State.finished, 0, None),
        (DataError("a row is bad", where="a.jsonl:3"), State.failed, 3, "a row is bad: a.jsonl:3"),
        (PreemptedError("it was told to stop"), State.stopped, 75, "it was told to stop"),
        (KeyboardInterrupt(), State.failed, 130, "interrupted"),
        (ValueError("a bug\nin two lines"), State.failed, 1, "ValueError: a bug"),
        (OSError("password=abc"), State.failed, 1, "OSError: password=***"),
        (SystemExit(7), State.failed, 7, None),
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
    end_run(tmp_path, 6)
    assert read_run(tmp_path) == record


def test_a_second_start_goes_on_and_tells_how_the_first_was_lost(tmp_path):
    first = begin(tmp_path)
    first._begun_seconds -= 10
    first.step_done(3)
    first.record.tokens = 30
    first.write()
    second = begin(tmp_path).record
    assert (second.start, second.step, second.tokens) == (2, 3, 30)
    assert second.earlier_seconds == first.record.seconds >= 10
    assert events(tmp_path) == [(1, "start", None), (1, "end", "lost"), (2, "start", None)]


def test_steps_are_written_now_and_then(tmp_path, monkeypatch):
    recorder = begin(tmp_path)
    recorder.step_done(1)
    assert read_run(tmp_path).step == 0
    monkeypatch.setattr("hfdist.records.recorder._WRITE_SECONDS", 0.0)
    recorder.step_done(2)
    assert read_run(tmp_path).step == 2


def test_what_has_started_rank_0_writes_how_it_ended(tmp_path):
    begin(tmp_path)
    RunRecorder.of_process = None
    # Another start holds the folder.
    end_run(tmp_path, 6, launcher_pid=1)
    assert read_run(tmp_path).state is State.running
    end_run(tmp_path, 6, "it was killed", launcher_pid=os.getppid())
    assert (read_run(tmp_path).exit_code, read_run(tmp_path).error) == (6, "it was killed")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"schema": 99}', '{"schema": 1, "state": "odd"}', "\0"])
def test_what_is_no_record_is_none_and_a_run_begins_anew(tmp_path, content):
    (tmp_path / RUN_FILE).write_text(content)
    assert read_run(tmp_path) is None
    end_run(tmp_path, 0)
    assert begin(tmp_path).record.start == 1


def test_fields_of_later_versions_are_passed_over(tmp_path):
    content = begin(tmp_path).record.to_json() | {"new": 1}
    (tmp_path / RUN_FILE).write_text(json.dumps(content))
    assert read_run(tmp_path).start == 1


def test_an_end_on_a_full_disk_is_no_second_error(tmp_path, monkeypatch):
    recorder = begin(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    recorder.end(0)


def start_killed(folder):
    def start_ranks(*_, **__):
        # As rank 0 would have been started, and killed.
        RunRecorder(folder, {}, 2).record.launcher_pid = os.getpid()
        RunRecorder.of_process.write()
        RunRecorder.of_process = None
        raise PeerError(f"a process was ended by {signal.Signals(9).name}, and with it the run")

    return start_ranks


def test_the_command_that_starts_ranks_tells_that_they_were_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("hfdist.launch.start_ranks", start_killed(tmp_path))
    config = compose_config(["model=tiny", f"run.dir={tmp_path}", "launch.processes=2"])
    with pytest.raises(PeerError):
        command._start_ranks(sys.exit, config, 2)
    record = read_run(tmp_path)
    assert (record.state, record.exit_code) == (State.failed, 6)
    assert record.error == "a process was ended by SIGKILL, and with it the run"


def test_events_have_a_time_and_their_fields(tmp_path):
    begin(tmp_path).add(Event.save, step=2, bytes=10)
    line = read_lines(tmp_path / EVENTS)[-1]
    assert line["time"].endswith("+00:00")
    assert {name: line[name] for name in ("start", "event", "step", "bytes")} == {
        "start": 1, "event": "save", "step": 2, "bytes": 10
    }  # fmt: skip


def test_the_page_names_each_field_and_each_event():
    page = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(RunRecord)] + [one.value for one in (*State, *Event)]
    assert [name for name in names if f"`{name}`" not in page] == []
