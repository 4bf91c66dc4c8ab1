"""Runs contenders in turn, each in a process of its own, and gathers medians of what they report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.data.contenders import CONTENDERS, Contender
from benchmarks.overlay import UnavailableError, peer_environment
from benchmarks.table import last_said

_ROOT = Path(__file__).resolve().parents[2]
_RUN_SECONDS = 600
_SAMPLE_SECONDS = 0.2
_SHOWN_LINES = 3
_SHARED_MEMORY, _OF_STREAMING = Path("/dev/shm"), re.compile(r"\d{6}_[a-z_]+")


class Figures(NamedTuple):
    """Medians of one contender."""

    tokens_per_cpu_second: float
    tokens_per_second: float
    first_seconds: float
    first_with_imports_seconds: float
    resume_seconds: float
    resumes_exactly: bool
    peak_bytes: float
    """Process and workers; a page that they share counts once."""


class Failure(NamedTuple):
    """A contender without figures."""

    reason: str


class Row(NamedTuple):
    """One line of the report."""

    contender: Contender
    result: Figures | Failure


def run_rounds(
    folder: Path, numbers: Sequence[int], num_rounds: int, *, num_resumes: int = 1, at_once: int = 1
) -> list[Row]:
    """Prepare all, then measure all in each round, so that a busy spell hits all alike. A failure takes one out.

    Args:
        folder: of the work.
        numbers: of the contenders.
        num_rounds: of reading an epoch.
        num_resumes: in how many of the first rounds to resume: starting a process takes longer than what it does.
        at_once: how many contenders run side by side; with more than one, figures say little.
    """
    failures: dict[int, Failure] = {}
    whole: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    resumed: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}

    def take_turn(step: int, number: int) -> None:
        try:
            if step < 0:
                _run("prepare", number, folder)
                return
            if step < num_rounds:
                whole[number].append(_run("whole", number, folder))
            if step < num_resumes:
                resumed[number].append(_run("resume", number, folder))
        except RuntimeError as error:
            failures[number] = Failure(str(error))

    with without_shared_memory():
        for step in range(-1, max(num_rounds, num_resumes)):
            # What is prepared is not timed.
            with ThreadPoolExecutor(os.cpu_count() if step < 0 else at_once) as pool:
                list(pool.map(partial(take_turn, step), [number for number in numbers if number not in failures]))
    return [Row(CONTENDERS[n], failures.get(n) or _figures(whole[n], resumed[n])) for n in numbers]


def _figures(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> Figures:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    return Figures(
        tokens_per_cpu_second=median([run["tokens"] / run["cpu_seconds"] for run in whole]),
        tokens_per_second=median([run["tokens"] / run["wall_seconds"] for run in whole]),
        first_seconds=median([run["first_seconds"] for run in whole]),
        first_with_imports_seconds=median([run["first_with_imports_seconds"] for run in whole]),
        resume_seconds=median([run["first_seconds"] for run in resumed]),
        resumes_exactly=whole[0]["digests"] == resumed[0]["digests"],
        peak_bytes=median([run["peak_bytes"] for run in whole]),
    )


def _run(phase: str, number: int, folder: Path) -> dict[str, Any]:
    """Run one phase of one contender.

    Raises:
        RuntimeError: it failed, took too long, or is not installed.
    """
    arguments = [sys.executable, "-m", "benchmarks.data.measured", phase, str(number), str(folder)]
    # Files, not pipes: a worker that outlives its process would keep a pipe open, and the reader waiting.
    with (folder / f"{phase}-{number}.out").open("w+") as out, (folder / f"{phase}-{number}.log").open("w+") as log:
        process = subprocess.Popen(
            [*arguments, str(time.monotonic())],
            cwd=_ROOT,
            env=_peer_paths(CONTENDERS[number]) | environment(folder),
            stdout=out,
            stderr=log,
            start_new_session=True,
        )
        sampler = _Sampler(process.pid)
        sampler.start()
        try:
            process.wait(_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{phase}: not done after {_RUN_SECONDS} s") from None
        finally:
            end_session(process.pid)
            process.wait()
            sampler.join()
        out.seek(0)
        log.seek(0)
        reported = [line for line in out if line.startswith("{")]
        said = last_said(log.read(), _SHOWN_LINES) or f"exit status {process.returncode}"
    if process.returncode != 0 or not reported:
        raise RuntimeError(f"{phase}: {said}")
    figures: dict[str, Any] = json.loads(reported[-1])
    if "missing" in figures:
        raise RuntimeError(f"not installed ({figures['missing']})")
    return figures | {"peak_bytes": sampler.peak_bytes}


def _peer_paths(contender: Contender) -> dict[str, str]:
    """Variables with which a process sees what its contender needs.

    Raises:
        RuntimeError: it cannot be installed.
    """
    try:
        return peer_environment("data") if contender.needs_peers else dict(os.environ)
    except UnavailableError as error:
        raise RuntimeError(str(error)) from error


def environment(folder: Path) -> dict[str, str]:
    """One thread a process, no network, and caches and temporary files inside the benchmark's folder."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return {
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """Take away what peers leave in shared memory when they are ended: mosaicml-streaming does."""
    before = set(_SHARED_MEMORY.iterdir())
    try:
        yield
    finally:
        for left in set(_SHARED_MEMORY.iterdir()) - before:
            if _OF_STREAMING.match(left.name):
                left.unlink(missing_ok=True)


def end_session(pid: int) -> None:
    """End the process and the workers that it has left: all that is in its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class _Sampler(threading.Thread):
    """Watches the memory of a process and its workers from outside, so that it costs them no time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.peak_bytes = 0

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._pid)
            while root.status() != psutil.STATUS_ZOMBIE:
                sizes = [_proportional_bytes(process) for process in [root, *root.children(recursive=True)]]
                self.peak_bytes = max(self.peak_bytes, sum(sizes))
                time.sleep(_SAMPLE_SECONDS)


def _proportional_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return int(process.memory_full_info().pss)
    return 0
