"""Sweeps of real runs, each in processes of its own."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from hfdist import __main__ as main
from hfdist.records import RunFolder, read_lines
from hfdist.records.trials import TrialLog
from tests.e2e.forked import run_forked

pytestmark = pytest.mark.e2e

TINY = ("model=tiny", "train.global_batch_size=4", "train.micro_batch_size=2", "data.sequence_length=64",
        "data.workers=0", "data.eval_sequences=8", "report=quiet")  # fmt: skip


def hfdist(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "hfdist", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def train_again(folder, said):
    """Follow what a sweep says in its end, and give the run folder."""
    (again,) = [line for line in said.splitlines() if line.endswith("# trains the best one again")]
    words = shlex.split(again.removeprefix("  hfdist "), comments=True)
    replay = run_forked(*words, cwd=folder, script=main.__file__)
    assert replay.returncode == 0, replay.stderr
    return (folder / words[-1]).parent / "best"


def losses_of(run):
    return {line["step"]: line["loss"] for line in read_lines(RunFolder(run).metrics) if "loss" in line}


@pytest.mark.many  # the sweep below is one of real runs, too; side by side and locks are tried in tests/unit
def test_layouts_side_by_side_and_a_second_controller_is_refused(tmp_path):
    command = ("sweep", "sweep=grid", "run.name=grid", *TINY, "strategy=choice(ddp,zero1)", "launch.processes=2",
               "train.max_steps=3", "checkpoint=none", "sweep.slots=2")  # fmt: skip
    sweep = hfdist(tmp_path, *command)
    while not (tmp_path / "runs/grid/sweep.jsonl").is_file():
        assert sweep.poll() is None, sweep.communicate()
        time.sleep(0.1)
    second = hfdist(tmp_path, *command)
    _, problem = second.communicate(timeout=120)
    assert second.returncode == 2
    assert "run.lock" in problem or "another run" in problem
    said, problem = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, problem
    trials = TrialLog(tmp_path / "runs/grid").trials
    assert [trial.values for trial in trials] == [{"strategy": "ddp"}, {"strategy": "zero1"}]
    # The same mathematics, so the same loss.
    assert trials[0].value == pytest.approx(trials[1].value, rel=1e-5)
    assert "best: runs/grid/trial-000" in said
    assert "its model: runs/grid/trial-000" in said


def test_the_best_trial_goes_on_from_its_checkpoint_also_after_a_stop(tmp_path):
    command = ("sweep", "sweep=asha", "run.name=asha", *TINY, "optimizer.schedule=wsd", "train.max_steps=6",
               "optimizer.warmup_steps=2", "optimizer.warmup_fraction=null", "train.eval_every=null",
               "sweep.trials=2", "sweep.rungs=2", "sweep.factor=2",
               "optimizer.lr=tag(log, interval(1e-4, 1e-1))")  # fmt: skip
    sweep = hfdist(tmp_path, *command)
    while not any(trial.results for trial in TrialLog(tmp_path / "runs/asha").trials):
        assert sweep.poll() is None, sweep.communicate()
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    _, problem = sweep.communicate(timeout=120)
    assert sweep.returncode == 75, problem
    sweep = hfdist(tmp_path, *command)
    said, problem = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, problem
    trials = TrialLog(tmp_path / "runs/asha").trials
    steps = sorted([result.step for result in trial.results] for trial in trials)
    assert steps == [[3], [3, 6]]
    best = next(trial for trial in trials if len(trial.results) == 2)
    events = read_lines(RunFolder(tmp_path / f"runs/asha/trial-{best.number:04d}").events)
    assert [event["step"] for event in events if event["event"] == "resume"] == [3]
    # The rate falls on the last rung only, as it does in one run.
    assert losses_of(train_again(tmp_path, said)) == losses_of(tmp_path / f"runs/asha/trial-{best.number:04d}")


@pytest.mark.many  # the sweep above trains again, too; members and changes are tried in tests/unit/sweep
def test_the_best_member_of_a_population_is_trained_again_as_one_run(tmp_path):
    """Its history becomes `optimizer.changes`, and the losses are the same, bit by bit."""
    command = ("sweep", "sweep=pbt", "run.name=pbt", *TINY, "optimizer.schedule=constant", "train.max_steps=6",
               "optimizer.warmup_steps=1", "optimizer.warmup_fraction=null", "train.eval_every=null",
               "sweep.trials=2", "sweep.generations=3", "sweep.slots=2",
               "sweep.seed=8",  # the first rates are too small, and the factors for the changed members 1.25
               "optimizer.lr=tag(log, interval(1e-5, 1e-2))", "optimizer.weight_decay=interval(0.01, 0.1)")  # fmt: skip
    sweep = hfdist(tmp_path, *command)
    said, problem = sweep.communicate(timeout=170)
    assert sweep.returncode == 0, problem
    ours = losses_of(train_again(tmp_path, said))
    trials = TrialLog(tmp_path / "runs/pbt").trials
    best = min(trials[-2:], key=lambda trial: trial.value)
    history = [best]
    while history[0].parent is not None:
        history.insert(0, trials[history[0].parent])
    assert len({str(trial.values) for trial in history}) > 1
    theirs = {}
    for trial in history:
        theirs |= losses_of(tmp_path / f"runs/pbt/trial-{trial.number:04d}")
    assert sorted(ours) == [1, 2, 3, 4, 5, 6]
    assert ours == theirs
