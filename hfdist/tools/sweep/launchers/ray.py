"""A launcher of trials on a Ray cluster: this machine runs the program of `hfdist job to=ray` for each trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hfdist.processes.child_python import python
from hfdist.tools.jobs.job import Job
from hfdist.tools.jobs.ray import write_ray
from hfdist.tools.sweep.launchers.base import LaunchedTrial
from hfdist.tools.sweep.launchers.local import TrialProcess

PROGRAM = "job.ray.py"
"""File in the folder of a trial: the program that asks Ray for machines and starts the trial there."""


class RayLauncher:
    """A launcher of a program for each trial, a driver of Ray, which takes its machines in a placement group.

    Args:
        make_job: function that gives the job of a trial from its overrides and the path of its program.
    """

    poll_seconds = 0.5

    def __init__(self, make_job: Callable[[Sequence[str], Path], Job]) -> None:
        self._make_job = make_job

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> TrialProcess:
        """Write the program of a trial, and start it on this machine."""
        path = folder / PROGRAM
        write_ray(self._make_job(overrides, path)).write()
        return TrialProcess.start(python(str(path)), folder, slot=slot, rung=rung, environment={})

    def find_all(self) -> dict[Path, LaunchedTrial]:
        """Give the trials whose programs run on this machine, by their folders."""
        return TrialProcess.find_all()
