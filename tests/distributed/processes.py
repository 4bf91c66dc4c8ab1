"""Starts of a run whose processes can be killed one by one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path

import psutil

from hfdist.config.run import RunConfig
from hfdist.testing import run_ranks
from recipes.pretrain import main

LONGEST_SECONDS = 240
"""Of one life of the run."""
MOST_SECONDS_TO_END = 30
"""For the processes that are left, once one was killed."""


class Victim(Enum):
    """Who is killed."""

    everyone = "every process"
    rank = "one rank"
    loader = "a loader worker"


class Life:
    """One start of a run, in a process group of its own; each rank calls `run`."""

    def __init__(
        self, config: RunConfig, num_ranks: int, log: Path, run: Callable[[RunConfig], object] = main.__wrapped__
    ) -> None:
        self._has_store = num_ranks > 1
        self._process = multiprocessing.get_context("fork").Process(target=_live, args=(config, num_ranks, log, run))
        self._process.start()
        self.log = log

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended."""
        return not self._process.is_alive()

    @property
    def has_finished(self) -> bool:
        """Whether they have come to the end of the run."""
        return self._process.exitcode == 0

    @property
    def group(self) -> int:
        """Id of the process group."""
        return self._process.pid

    def ranks(self) -> list[psutil.Process]:
        """Those that have started; the first child serves the store at which they meet."""
        return sorted(_children(self.group), key=lambda child: child.pid)[int(self._has_store) :]

    def loaders(self) -> list[psutil.Process]:
        """Loader workers of all ranks."""
        return [worker for rank in self.ranks() for worker in _children(rank.pid)]

    def wait(self, condition: Callable[[], object]) -> bool:
        """Wait until it holds; False: the life was over before."""
        while not condition():
            if self.is_over:
                return False
            time.sleep(0.0005)
        return True

    def aim(self, victim: Victim, seed: int) -> Callable[[], object]:
        """Find whom to kill, waiting until there is one, and give what kills; `seed` chooses."""
        if victim is Victim.everyone:
            return partial(os.killpg, self.group, signal.SIGKILL)
        find = self.ranks if victim is Victim.rank else self.loaders
        assert self.wait(find), f"over before there was {victim.value}:\n{self.log.read_text()}"
        return random.Random(seed).choice(find()).kill

    def end(self, most_seconds: float = MOST_SECONDS_TO_END) -> float:
        """See that all ranks end once one process is gone, and give the seconds that it took."""
        begin = time.monotonic()
        self._process.join(most_seconds)
        if not self.is_over:
            os.killpg(self.group, signal.SIGKILL)
            raise AssertionError(f"ranks hang:\n{self.log.read_text()}")
        return time.monotonic() - begin

    def join(self) -> None:
        """Wait for the end of the run."""
        self._process.join(LONGEST_SECONDS)
        assert self.has_finished, self.log.read_text()


def _live(config: RunConfig, num_ranks: int, log: Path, run: Callable[[RunConfig], object]) -> None:
    os.setsid()
    # What the ranks inherit is no garbage: their collections need not look through it.
    gc.freeze()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stderr.fileno(), descriptor)
    run_ranks(run, num_ranks, config, group=num_ranks > 1, timeout_seconds=LONGEST_SECONDS)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def assert_gone(groups: list[int]) -> None:
    """Loader workers of a killed rank see within seconds that it is gone."""
    deadline = time.monotonic() + MOST_SECONDS_TO_END
    while left := [process for process in psutil.process_iter() if _group_of(process) in groups]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None
