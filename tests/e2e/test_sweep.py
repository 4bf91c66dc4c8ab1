"""Sweeps of real runs, in forks that inherit all imports. Trials of fresh processes are in tests/unit/sweep."""

import os
import shlex
import signal
import time
from pathlib import Path

import psutil
import pytest

from hfdist import __main__ as main
from hfdist.processes.child_python import module
from hfdist.processes.stop_signals import STOP_SIGNALS
from hfdist.records import RunFolder, read_lines
from hfdist.records.trials import TrialLog
from hfdist.tools.sweep.launchers import local
from tests.e2e.forked import end, run_forked, run_script, start_forked

pytestmark = pytest.mark.e2e

TINY = ("model=tiny", "train.global_batch_size=4", "train.micro_batch_size=2", "data.sequence_length=64",
        "data.workers=0", "data.eval_sequences=8", "report=quiet")  # fmt: skip


def run_trial(*arguments):
    # A new process would not have the handlers of the sweep.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    run_script(main.__file__, *arguments)


class ForkedTrial(psutil.Process):
    """What the launcher asks of a process that it has started."""

    def __init__(self, command, *, stdout, env, **named):
        start = module("hfdist")
        assert command[: len(start)] == start
        said = Path(stdout.name).absolute()
        self._fork = start_forked(run_trial, *command[len(start) :], cwd=Path.cwd(), said=(said, said), **env)
        super().__init__(self._fork.pid)

    def wait(self, timeout=None):
        self._fork.join(timeout)
        return self._fork.exitcode


@pytest.fixture(autouse=True)
def forked_trials(monkeypatch):
    monkeypatch.setattr(local.psutil, "Popen", ForkedTrial)


class Sweep:
    """The command, and what it has said: `read` gives its exit code, standard output and error."""

    def __init__(self, folder, name, *arguments):
        self._said = [folder / f"{name}.{stream}" for stream in ("stdout", "stderr")]
        self.process = start_forked(run_script, main.__file__, *arguments, cwd=folder, said=self._said)

    def read(self):
        code = end(self.process, 170)
        return code, *(path.read_text() for path in self._said)


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
    sweep = Sweep(tmp_path, "first", *command)
    while not (tmp_path / "runs/grid/sweep.jsonl").is_file():
        assert sweep.process.is_alive(), sweep.read()
        time.sleep(0.1)
    code, _, problem = Sweep(tmp_path, "second", *command).read()
    assert code == 2
    assert "run.lock" in problem or "another run" in problem
    code, said, problem = sweep.read()
    assert code == 0, problem
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
    sweep = Sweep(tmp_path, "first", *command)
    while not any(trial.results for trial in TrialLog(tmp_path / "runs/asha").trials):
        assert sweep.process.is_alive(), sweep.read()
        time.sleep(0.1)
    os.kill(sweep.process.pid, signal.SIGTERM)
    code, _, problem = sweep.read()
    assert code == 75, problem
    code, said, problem = Sweep(tmp_path, "second", *command).read()
    assert code == 0, problem
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
    code, said, problem = Sweep(tmp_path, "sweep", *command).read()
    assert code == 0, problem
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
