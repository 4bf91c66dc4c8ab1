"""Disturb runs on two machines and a real SLURM; `python -m proofs.cluster FILE` writes what happened into a page."""

from __future__ import annotations

import platform
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from proofs.cluster.elastic import leave_and_come_back
from proofs.cluster.slurm import slurm, version
from proofs.cluster.slurm_array import shared_tokens
from proofs.cluster.slurm_stories import (
    Jobs,
    lost_machine,
    preempted_and_out_of_time,
    sweep_of_jobs,
    used_up,
    wrong_key,
)
from proofs.cluster.story import Story
from tests.cluster.machines import two_machines
from tests.imports import import_all

HEADING = "## What happened"


def tell(folder: Path) -> list[Story]:
    """Do all of it; AssertionError: a run ends otherwise than it should."""
    with two_machines() as machines, pytest.MonkeyPatch.context() as monkeypatch:
        (folder / "elastic").mkdir()
        elastic = leave_and_come_back(machines, folder / "elastic", monkeypatch)
        elastic.check((2, 6), (1, 75), (2, 0))
    with slurm(folder / "slurm") as cluster, pytest.MonkeyPatch.context() as monkeypatch:
        jobs = Jobs(cluster, monkeypatch)
        wrong = wrong_key(jobs)
        wrong.check()
        # By torchrun's exit code: a start that was refused writes no record.
        assert wrong.end == "The job is FAILED with exit code 1; requeues: 0.", wrong
        budget = used_up(jobs)
        budget.check((2, 8))
        assert budget.end == "The job is FAILED with exit code 8; requeues: 0.", budget
        preempted = preempted_and_out_of_time(jobs)
        preempted.check((2, 75), (1, 75), (2, 0))
        lost = lost_machine(jobs)
        lost.check((2, 6), (2, 0))
        swept = sweep_of_jobs(jobs)
        swept.check((2, 75), (2, 0))
        shared = shared_tokens(jobs)
    return [elastic, preempted, lost, budget, wrong, swept, shared]


def main() -> None:
    """Write the last part of the page."""
    # Told to end, it still leaves no machine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    import_all()
    page = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="hfdist-cluster-") as folder:
        stories = tell(Path(folder))
    head = f"Written by `make cluster` with {version()}, torch {torch.__version__}, Python {platform.python_version()}."
    lines = [line for story in stories for line in story.lines()]
    text = page.read_text(encoding="utf-8").partition(HEADING)[0]
    page.write_text("\n".join([f"{text}{HEADING}", "", head, "", *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
