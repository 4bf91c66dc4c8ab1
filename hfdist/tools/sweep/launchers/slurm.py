"""Trials as jobs of SLURM, found again by their comment."""

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
_MARK = "hfdist sweep "
"""Begin of the comment of a job, before its TrialMark."""
_FROM_OUTSIDE = ("CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")
"""States of a job that was ended from outside: its exit code says nothing of the run."""
_MOST_TRIES, _TRY_SECONDS = 4, 5.0
"""Most tries of a command that SLURM does not answer, or refuses for now, and the seconds between two of them."""
_QUEUE = ("squeue", "--me", "--noheader", "--format=%i|%k")
"""Command that gives the numbers of jobs and their comments."""


class SlurmLauncher:
    """Submits a job for each trial.

    Args:
        make_job: gives the job of a trial with these overrides, written to this path.
    """

    poll_seconds = 2.0

    def __init__(self, make_job: Callable[[Sequence[str], Path], Job]) -> None:
        self._make_job = make_job
        self._queue: dict[int, str] = {}
        self._read_at = 0.0

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> LaunchedTrial:
        """See `Launcher`. A job that SLURM does not take is a ConfigError."""
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
        """See `Launcher`. A ConfigError where SLURM does not say what runs: trials would be started twice."""
        said = _try(*_QUEUE)
        if said.returncode != 0:
            what, found_words = "SLURM does not answer", " ".join(said.stderr.split())
            raise ConfigError(what, where="sweep.launcher", found=found_words, hint="squeue --me")
        self._take(said.stdout)
        found: dict[Path, LaunchedTrial] = {}
        for job, comment in self._queue.items():
            mark = read_mark(comment.removeprefix(_MARK)) if comment.startswith(_MARK) else None
            if mark is not None:
                found[mark.folder] = SlurmTrial(self, job, mark.slot, mark.rung)
        return found

    def read_queue(self) -> dict[int, str]:
        """Give the comments of the user's jobs that wait, run or end; as they were before, if SLURM does not answer."""
        if time.monotonic() - self._read_at >= self.poll_seconds:
            said = _run(*_QUEUE)
            if said.returncode == 0:
                self._take(said.stdout)
        return self._queue

    def _take(self, text: str) -> None:
        lines = [line.partition("|") for line in text.splitlines()]
        self._queue = {int(job): comment for job, _, comment in lines if job.isdecimal()}
        self._read_at = time.monotonic()


class SlurmTrial:
    """A job."""

    def __init__(self, launcher: SlurmLauncher, job: int, slot: int, rung: int) -> None:
        self._launcher, self._job, self.slot, self.rung = launcher, job, slot, rung
        self.exit_code: int | None = None

    def poll(self) -> bool:
        """See `LaunchedTrial`."""
        if self._job in self._launcher.read_queue():
            return False
        # SLURM forgets a job some minutes after its end.
        shown = _run("scontrol", "--oneliner", "show", "job", str(self._job)).stdout
        found, state = re.search(r"\bExitCode=(\d+):(\d+)", shown), re.search(r"\bJobState=(\w+)", shown)
        if found is not None and state is not None and state[1] not in _FROM_OUTSIDE:
            self.exit_code = -int(found[2]) or int(found[1])
        return True

    def stop(self, *, can_save: bool) -> None:
        """See `LaunchedTrial`."""
        # With the flag only the run's processes are told, which save, and nothing ends them by force. Before the job
        # has a step, the signal would reach nobody.
        _run("scancel", *(["--signal=TERM"] if can_save else []), str(self._job))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # In a session of its own: Ctrl-C is for the sweep, which tells its jobs.
    return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command again and again, while it fails."""
    for tries_left in reversed(range(_MOST_TRIES)):
        said = _run(*command)
        if said.returncode == 0 or not tries_left:
            break
        time.sleep(_TRY_SECONDS)
    return said
