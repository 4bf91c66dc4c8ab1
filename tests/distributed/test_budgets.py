"""Runs that stop at one budget after the other go on as if nothing had been, data parallel and in a pipeline."""

import hashlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hfdist.errors import BudgetError
from hfdist.records import Event, RunFolder, RunRecorder, State, add_event, read_lines, read_run, recording_end
from hfdist.records.run_file import write_run
from hfdist.topology import read_launcher
from proofs.faults import MAX_STEPS, make_config
from proofs.kills import newest_whole
from recipes.pretrain import main
from tests.distributed.processes import Life
from tests.distributed.runs import losses, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

MONEY = ("cost.price_per_hour=1", "cost.price_per_kwh=1", "cost.gco2e_per_kwh=400")


def run(config):
    """As a command does, but for its end: no rank waits for the other."""
    try:
        with recording_end():
            main.__wrapped__(config)
    except BudgetError as error:
        sys.stderr.write(f"rank {read_launcher().rank}: {error}\n")


def start(folder, layout, *overrides):
    """Start the run, or go on, and give what its ranks said."""
    life = Life(make_config(folder, layout, *MONEY, *overrides), 2, folder.parent / f"{folder.name}.log", run)
    life.join()
    return life.log.read_text()


def is_used_up(said, key):
    words = f"Budget used up: the budget of the run is used up\n  where:   train.{key}"
    return all(f"rank {rank}: {words}" in said for rank in (0, 1))


def stop(folder, layout, key, limit):
    """Let a budget stop the run; nothing is lost: its last step is saved, and the model is there. Gives that step."""
    said = start(folder, layout, f"train.{key}={limit}")
    assert is_used_up(said, key), said
    events = read_lines(RunFolder(folder).events)
    (event,) = [event for event in events if event["event"] == "budget" and event["which"] == key]
    step = event["step"]
    assert newest_whole(folder) == f"step-{step:08d}"
    assert [line["step"] for line in read_lines(RunFolder(folder).metrics) if "loss" in line] == list(
        range(1, step + 1)
    )
    assert said.count("held-out loss") == 1
    assert weights(folder)
    record = read_run(folder)
    assert (record.state, record.exit_code, record.step) == (State.stopped, 8, step)
    # The same command ends before there is a process group, and writes nothing.
    said = start(folder, layout, f"train.{key}={limit}")
    assert is_used_up(said, key), said
    assert "layout" not in said
    assert read_run(folder) == record
    return step


def slow_save(folder):
    """An earlier start, as its files tell, took two hours to save: so a deadline in one hour is near."""
    folder.mkdir()
    recorder = RunRecorder(folder, {}, 2)
    write_run(folder, recorder.record, is_durable=False)
    RunRecorder.of_process = None
    add_event(folder, Event.save, start=1, step=1, bytes=1, seconds=7200.0, stall_seconds=1.0)


def state(folder):
    ledger = {path.name: path.read_bytes() for path in RunFolder(folder).ledger.iterdir()}
    digest = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return losses(folder), digest, ledger


@pytest.mark.parametrize(
    ("layout", "first", "second"),
    [("ddp", "deadline", ("max_kwh", "energy_kwh")), many("pipeline", "max_hours", ("max_cost", "cost"))],
)
def test_a_run_that_stops_at_two_budgets_becomes_the_run_that_nobody_stopped(
    tmp_path: Path, cache_dir, layout, first, second
):
    folder = tmp_path / "stopped"
    limit = "1e-9"
    if first == "deadline":
        slow_save(folder)
        limit = datetime.fromtimestamp(time.time() + 3600, UTC).isoformat()
    steps = [stop(folder, layout, first, limit)]
    # Almost what the first start has used.
    key, figure = second
    steps.append(stop(folder, layout, key, read_run(folder).total(figure) * 1.0001))
    assert 1 <= steps[0] < steps[1] < MAX_STEPS
    said = start(folder, layout)
    assert f"resuming from {folder}/checkpoints/step-{steps[1]:08d}" in said
    whole = tmp_path / "whole"
    start(whole, layout)
    assert state(folder) == state(whole)
    record, line = read_run(folder), [line for line in read_lines(RunFolder(folder).metrics) if "loss" in line][-1]
    for name in ("energy_kwh", "cost", "gco2e"):
        assert 0 < getattr(record, f"earlier_{name}") < line[name] <= record.total(name)
