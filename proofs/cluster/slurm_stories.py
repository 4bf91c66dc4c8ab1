"""What a real SLURM does with the job file of `hfdist job`: pre-emption, time limit, lost machine, mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hfdist.records import RunRecord, State, read_run
from hfdist.records.trials import TrialLog
from proofs.cluster.slurm import Slurm
from proofs.cluster.story import MOST_LOSSES, Story, read_starts
from tests.cluster.runs import ROOT, SETTINGS, compare, install_pausing_optimizer, train_alone

_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_GRACE_SECONDS = 60


class Jobs:
    """Writes the job files of runs, submits them and waits for what happens."""

    def __init__(self, cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.folder = cluster, cluster.folder / "jobs"
        self.folder.mkdir()
        packages = self.folder / "packages"
        self.pausing = install_pausing_optimizer(packages, monkeypatch)
        # What sbatch finds in the environment goes with the job.
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{packages}")
        monkeypatch.setenv("HFDIST_CACHE", str(self.folder / "cache"))
        self.numbers: dict[str, int] = {}

    def write(self, name: str, *arguments: str, options: str = "") -> Path:
        """Write the job file of a run on two machines, or on what `options` of sbatch say; give its path."""
        run = (*SETTINGS, *self.pausing, f"run.dir={self.folder / name}", f"run.name={name}")
        return self.write_words(name, *run, *arguments, options=options)

    def write_words(self, name: str, *words: str, options: str = "") -> Path:
        """Write a job file for two machines by all words of its run; give its path."""
        path = self.folder / f"{name}.sbatch"
        cluster = ("cluster=slurm", f"cluster.grace_seconds={_GRACE_SECONDS}", f"cluster.python={sys.executable}",
                   f"cluster.slurm.options=[{options}]")  # fmt: skip
        command = [sys.executable, "-m", "hfdist", "job", "to=slurm", f"out={path}", *cluster, *words]
        subprocess.run(command, check=True, cwd=self.folder, timeout=60, stdout=subprocess.DEVNULL)
        return path

    def submit(self, path: Path) -> int:
        """Give the job's number."""
        self.numbers[path.stem] = self.cluster.submit(f"--chdir={self.folder}", "--export=ALL,PAUSE_SECONDS=0.3", path)
        return self.numbers[path.stem]

    def run_dir(self, name: str) -> Path:
        """Of a run."""
        return self.folder / name

    def said(self, name: str) -> str:
        """What the job has said in all its starts."""
        return (self.folder / f"{name}-{self.numbers[name]}.out").read_text()

    def wait_for(self, name: str, condition: Callable[[RunRecord], object], what: str) -> None:
        """Wait until it holds of the run's record, as long as the job is not over."""

        def holds() -> bool:
            record = read_run(self.run_dir(name))
            self._goes_on(name)
            return record is not None and bool(condition(record))

        self.cluster.wait_until(holds, what)

    def wait_until_requeued(self, name: str) -> None:
        """Wait until SLURM has the job in its queue again."""
        self.cluster.wait_until(lambda: self._goes_on(name) == "PENDING", f"{name} is requeued")

    def _goes_on(self, name: str) -> str:
        state = self.cluster.state(self.numbers[name])
        assert state not in _OVER, f"{state}\n{self.said(name)}"
        return state

    def wait_for_end(self, name: str) -> dict[str, str]:
        """Wait until the job is over, and give what SLURM shows of it."""
        number = self.numbers[name]
        self.cluster.wait_until(lambda: self.cluster.state(number) in _OVER, f"the end of {name}", 400)
        return self.cluster.show(number)


def preempted_and_out_of_time(jobs: Jobs) -> Story:
    """Two machines, then the one that is left, then two again."""
    cluster, name = jobs.cluster, "preempted"
    arguments = ("train.max_steps=250", "checkpoint.every=1000")
    number = jobs.submit(jobs.write(name, *arguments, options="'--nodes=1-2'"))
    jobs.wait_for(name, lambda run: run.step >= 10, "ten steps on two machines")
    urgent = cluster.submit("--partition=high", "--nodes=1", "--output=/dev/null", "--wrap", "sleep 100000")
    jobs.wait_for(name, lambda run: run.start == 2 and run.step >= 30, "a start on the machine that is left")
    cluster.cancel(urgent)
    # SLURM counts time limits in minutes, looks at them every half minute, and signals a minute before (the grace).
    hours_and_minutes = cluster.run("squeue", "--noheader", "--format=%M", f"--jobs={number}").split(":")[:-1]
    cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={int(hours_and_minutes[-1]) + 2}")
    jobs.wait_for(name, lambda run: run.start == 2 and run.state is State.stopped, "the end of its time")
    jobs.wait_until_requeued(name)
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    shown = jobs.wait_for_end(name)
    alone = train_alone(jobs.folder / "alone", *jobs.pausing, *arguments)
    return Story(
        "Pre-empted, out of time, and finished",
        "A job of one or two machines. A job of higher priority takes one machine. The second start is on the other "
        "machine, until its time limit comes. The third start has both machines again.",
        read_starts(jobs.run_dir(name)),
        f"The job is {shown['JobState']}; requeues: {shown['Restarts']}.",
        compare(jobs.run_dir(name), alone),
    )


def lost_machine(jobs: Jobs) -> Story:
    """SLURM loses a machine, and gets it back."""
    cluster, name = jobs.cluster, "lost"
    arguments = ("train.max_steps=40", "checkpoint.every=5", "watch.heartbeat_seconds=5")
    jobs.submit(jobs.write(name, *arguments))
    jobs.wait_for(name, lambda run: run.step >= 12, "two checkpoints")
    cluster.cut_power(cluster.machines[1])
    jobs.wait_until_requeued(name)
    cluster.give_power(cluster.machines[1])
    shown = jobs.wait_for_end(name)
    return Story(
        "A machine is lost",
        "The second machine of a job loses its power, and comes back when SLURM has seen it.",
        read_starts(jobs.run_dir(name)),
        f"The job is {shown['JobState']}; requeues: {shown['Restarts']}.",
        compare(jobs.run_dir(name), train_alone(jobs.folder / "lost-alone", *jobs.pausing, *arguments)),
    )


def wrong_key(jobs: Jobs) -> Story:
    """`hfdist job` refuses such a key when it writes the file, so it is written into the file by hand."""
    path = jobs.write("wrong")
    path.write_text(path.read_text().replace(" train.max_steps=", " train.max_stepz="))
    jobs.submit(path)
    shown = jobs.wait_for_end("wrong")
    assert "there is no key `train.max_stepz`" in jobs.said("wrong"), jobs.said("wrong")
    return Story(
        "A wrong key",
        "`train.max_stepz` in the job file, written by hand, since `hfdist job` refuses it.",
        read_starts(jobs.run_dir("wrong")) if jobs.run_dir("wrong").is_dir() else [],
        f"The job is {shown['JobState']} with exit code {shown['ExitCode'][0]}; requeues: {shown['Restarts']}.",
    )


def used_up(jobs: Jobs) -> Story:
    """The same command would go on where it must not."""
    jobs.submit(jobs.write("budget", "train.max_steps=100000", "checkpoint.every=1000", "train.max_hours=0.01"))
    shown = jobs.wait_for_end("budget")
    return Story(
        "A budget",
        "`train.max_hours` comes to its end.",
        read_starts(jobs.run_dir("budget")),
        f"The job is {shown['JobState']} with exit code {shown['ExitCode'][0]}; requeues: {shown['Restarts']}.",
    )


def sweep_of_jobs(jobs: Jobs) -> Story:
    """The sweep is killed while two jobs run, told to stop, told so again before the jobs train, and goes on."""
    cluster, folder = jobs.cluster, jobs.folder
    arguments = ("sweep=random", "sweep.trials=3", "sweep.slots=2", "optimizer.lr=tag(log, interval(1e-4, 1e-2))",
                 *SETTINGS, *jobs.pausing, "train.max_steps=60", "checkpoint.every=10",
                 "launch.processes=2")  # fmt: skip
    command = (sys.executable, "-m", "hfdist", "sweep")
    on_slurm = (*command, *arguments, f"run.dir={folder / 'sweep'}", "sweep.launcher=slurm", "cluster.processes=2",
                f"cluster.grace_seconds={_GRACE_SECONDS}", f"cluster.python={sys.executable}")  # fmt: skip

    def start() -> subprocess.Popen[bytes]:
        return cluster.machines[0].start(on_slurm, folder / "sweep.out", PAUSE_SECONDS="0.3", **cluster.environment)

    def both(condition: Callable[[RunRecord], object]) -> bool:
        records = [read_run(folder / "sweep" / f"trial-{number:04d}") for number in (0, 1)]
        return all(record is not None and condition(record) for record in records)

    first = start()
    cluster.wait_until(lambda: both(lambda run: run.step >= 5), "two trials that run")
    first.kill()
    first.wait()
    second = start()
    cluster.wait_until(lambda: both(lambda run: run.step >= 15), "fifteen steps of both")
    second.terminate()
    assert second.wait(120) == 75, (folder / "sweep.out").read_text()
    third = start()
    running = ("squeue", "--noheader", "--states=RUNNING")
    cluster.wait_until(lambda: len(cluster.run(*running).splitlines()) == 2, "two jobs that go on")
    third.terminate()
    assert third.wait(120) == 75, (folder / "sweep.out").read_text()
    assert both(lambda run: run.start == 1), "a signal that came before the first step was missed"
    fourth = start()
    assert fourth.wait(300) == 0, (folder / "sweep.out").read_text()
    subprocess.run([*command, *arguments, f"run.dir={folder / 'local'}"], check=True, stdout=subprocess.DEVNULL)
    ours, theirs = TrialLog(folder / "sweep").trials, TrialLog(folder / "local").trials
    assert [one.values for one in ours] == [one.values for one in theirs]
    losses = [(one.value, other.value) for one, other in zip(ours, theirs, strict=True)]
    assert all(one is not None and other is not None for one, other in losses), losses
    furthest = max(abs(one - other) / other for one, other in losses if one is not None and other is not None)
    assert furthest < MOST_LOSSES, losses
    return Story(
        "A sweep of jobs",
        "`hfdist sweep sweep.launcher=slurm`: three trials of two processes, two jobs at a time. The sweep is killed "
        "(`kill -9`) while both run, finds them again, is told to stop, is told so again before its new jobs have "
        "begun to train, and goes on. The table is that of trial 0.",
        read_starts(folder / "sweep" / "trial-0000"),
        f"All three trials have the values of the same sweep on one machine, and the losses to {furthest:.1e}.",
    )
