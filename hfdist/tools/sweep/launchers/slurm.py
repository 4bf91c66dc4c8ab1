"""A launcher of trials as jobs of SLURM, which carry a mark as their comment, so that a later process finds them."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hfdist.errors import ConfigError
from hfdist.tools.jobs.job import Job
from hfdist.tools.jobs.slurm import write_slurm
from hfdist.tools.sweep.launchers.base import LOG, LaunchedTrial, TrialMark, read_mark

SCRIPT = "job.sbatch"
"""File in the folder of a trial: the script of its job."""
_MARK = "hfdist sweep "
"""First words of the comment of a job, before its TrialMark."""
_FROM_OUTSIDE = ("CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")
"""States of a job that was ended from outside: its exit code says nothing of the run."""
_MOST_TRIES, _TRY_SECONDS = 4, 5.0
"""Most tries of a command that SLURM does not answer, or refuses for now, and the seconds between two tries."""
_QUEUE = ("squeue", "--me", "--noheader", "--format=%i|%k")
"""Command that gives the numbers of the user's jobs and their comments."""


class SlurmLauncher:
    """A launcher that submits a job for each trial.

    Args:
        make_job: function that gives the job of a trial from its overrides and the path of its script.
    """

    poll_seconds = 2.0

    def __init__(self, make_job: Callable[[Sequence[str], Path], Job]) -> None:
        self._make_job = make_job
        self._queue: dict[int, str] = {}
        """Comments of the user's jobs, by their numbers."""
        self._read_at = 0.0
        """When the queue was read last, by the clock that never goes back."""

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> LaunchedTrial:
        """Submit the job of a trial.

        Raises:
            ConfigError: SLURM does not take the job.
        """
        path = folder / SCRIPT
        write_slurm(self._make_job(overrides, path), requeues=False).write()
        # The sweep itself decides whether a trial starts again, whatever the site or cluster.slurm.options say.
        options = ["--parsable", "--no-requeue", f"--output={folder.resolve() / LOG}", "--open-mode=append"]
        said = _try("sbatch", *options, f"--comment={_MARK}{TrialMark(slot, rung, folder)}", str(path))
        # A program that a site has put before sbatch may print lines of its own.
        numbers = re.findall(r"^(\d+)(?:;.*)?\s*$", said.stdout, flags=re.MULTILINE)
        if said.returncode != 0 or not numbers:
            found = " ".join((said.stderr or said.stdout).split())
            raise ConfigError("SLURM does not take the job", where="sweep.launcher", found=found, hint=f"sbatch {path}")
        job = int(numbers[-1])
        self._queue[job] = ""
        # The queue is read anew at the next look: what was read before does not know the job.
        self._read_at = 0.0
        return SlurmTrial(self, job, slot, rung)

    def find_all(self) -> dict[Path, LaunchedTrial]:
        """Give all jobs of trials that wait or run, by the folders of the trials.

        Raises:
            ConfigError: SLURM does not say what runs. Without that, trials would be started twice.
        """
        said = _try(*_QUEUE)
        if said.returncode != 0:
            what, found_words = "SLURM does not answer", " ".join(said.stderr.split())
            raise ConfigError(what, where="sweep.launcher", found=found_words, hint="squeue --me")
        self._take_queue(said.stdout)
        trials: dict[Path, LaunchedTrial] = {}
        for job, comment in self._queue.items():
            mark = read_mark(comment.removeprefix(_MARK)) if comment.startswith(_MARK) else None
            if mark is not None:
                trials[mark.folder] = SlurmTrial(self, job, mark.slot, mark.rung)
        return trials

    def read_queue(self) -> dict[int, str]:
        """Give the comments of the user's jobs that wait, run or end, by their numbers.

        They are as they were before if they were read a moment ago, or if SLURM does not answer.
        """
        if time.monotonic() - self._read_at >= self.poll_seconds:
            said = _run(*_QUEUE)
            if said.returncode == 0:
                self._take_queue(said.stdout)
        return self._queue

    def _take_queue(self, text: str) -> None:
        """Keep the queue that `_QUEUE` has written; the number of an array's task is no whole number, and left out."""
        lines = [line.partition("|") for line in text.splitlines()]
        self._queue = {int(job): comment for job, _, comment in lines if job.isdecimal()}
        self._read_at = time.monotonic()


class SlurmTrial:
    """A launched trial as a job of SLURM."""

    def __init__(self, launcher: SlurmLauncher, job: int, slot: int, rung: int) -> None:
        self._launcher, self._job, self.slot, self.rung = launcher, job, slot, rung
        self.exit_code: int | None = None
        """The exit code after the end, below zero for a signal; None: before, or if SLURM does not say it."""

    def poll(self) -> bool:
        """Look whether the job has left the queue; if it has, ask for its exit code."""
        if self._job in self._launcher.read_queue():
            return False
        # SLURM forgets a job some minutes after its end.
        shown = _run("scontrol", "--oneliner", "show", "job", str(self._job)).stdout
        codes = re.search(r"\bExitCode=(?P<code>\d+):(?P<signal>\d+)", shown)
        state = re.search(r"\bJobState=(?P<state>\w+)", shown)
        if codes is not None and state is not None and state["state"] not in _FROM_OUTSIDE:
            self.exit_code = -int(codes["signal"]) or int(codes["code"])
        return True

    def stop(self, *, can_save: bool) -> None:
        """Tell the run's processes to save and to stop, or cancel the job if its run has not begun."""
        # A signal reaches only the run's processes, and nothing ends them by force after it. Before the job has a
        # step, it would reach nobody.
        options = ["--signal=TERM"] if can_save else []
        _run("scancel", *options, str(self._job))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM, and give its exit code and what it has said."""
    # It has a session of its own: Ctrl-C is for the sweep, which tells its jobs.
    return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and again some seconds later as long as it fails, a few times; give its last result."""
    for tries_left in reversed(range(_MOST_TRIES)):
        said = _run(*command)
        if said.returncode == 0 or not tries_left:
            break
        time.sleep(_TRY_SECONDS)
    return said
