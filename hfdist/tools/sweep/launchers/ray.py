"""Trials on the machines of a Ray cluster: this machine starts the program of `hfdist job to=ray` for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hfdist.processes.child_python import python
from hfdist.tools.jobs.job import Job
from hfdist.tools.jobs.ray import write_ray
from hfdist.tools.sweep.launchers.base import LaunchedTrial
from hfdist.tools.sweep.launchers.local import TrialProcess

PROGRAM = "job.ray.py"


class RayLauncher:
    """Starts a driver of Ray for each trial; it takes its machines in a placement group.

    Args:
        make_job: gives the job of a trial with these overrides, written to this path.
    """

    poll_seconds = 0.5

    def __init__(self, make_job: Callable[[Sequence[str], Path], Job]) -> None:
        self._make_job = make_job

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> TrialProcess:
        path = folder / PROGRAM
        write_ray(self._make_job(overrides, path)).write()
        return TrialProcess.start(python(str(path)), folder, slot=slot, rung=rung, environment={})

    def find_all(self) -> dict[Path, LaunchedTrial]:
        return TrialProcess.find_all()
