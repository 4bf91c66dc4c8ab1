"""The recipe on forked ranks, each with a fault of its own, and how each of them ended."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from hfdist.data import TokenStream
from hfdist.errors import DataError
from hfdist.records import RunFolder, read_lines
from hfdist.testing import forget_parent
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.trainer import Trainer
from recipes.pretrain import main
from tests.distributed.runs import SMALL

MOST_SECONDS = 60
BEGAN = "began"


class Ranks:
    """The ranks of one start, with their real exit codes."""

    def __init__(self, folder: Path, num_ranks: int, overrides: list[str], fault: Callable[[int], None]) -> None:
        self.run_dir, self._log = folder / "run", folder / "log"
        arguments = [*SMALL, "strategy=ddp", f"run.dir={self.run_dir}", *overrides]
        start = multiprocessing.get_context("fork").Process
        self.processes = [
            start(target=_rank, args=(folder, rank, num_ranks, arguments, fault)) for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    @property
    def said(self) -> str:
        """What all of them wrote."""
        return self._log.read_text()

    @property
    def steps(self) -> int:
        """Done so far."""
        return len([line for line in read_lines(RunFolder(self.run_dir).metrics) if "loss" in line])

    @property
    def began(self) -> float:
        """When the fault began."""
        return self.run_dir.with_name(BEGAN).stat().st_mtime

    def send(self, number: signal.Signals, rank: int) -> None:
        """Signal one of them: that is the fault."""
        self.run_dir.with_name(BEGAN).touch()
        os.kill(self.processes[rank].pid, number)

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many are done."""
        deadline = time.monotonic() + MOST_SECONDS
        while self.steps < number:
            assert time.monotonic() < deadline, self.said
            assert all(process.is_alive() for process in self.processes), self.said
            time.sleep(0.01)

    def end(self, but: int | None = None) -> list[int | None]:
        """Wait for the end of all but one, and give their exit codes."""
        deadline = time.monotonic() + MOST_SECONDS
        others = [process for rank, process in enumerate(self.processes) if rank != but]
        for process in others:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in others]
        self.kill()
        return codes

    def kill(self) -> None:
        """Leave none behind."""
        for process in self.processes:
            process.kill()
            process.join()


def _rank(folder: Path, rank: int, num_ranks: int, arguments: list[str], fault: Callable[[int], None]) -> None:
    sys.stdout = sys.stderr = (folder / "log").open("a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stderr.fileno(), descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    forget_parent()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    os.chdir(folder)
    fault(rank)
    sys.argv = ["pretrain.py", *arguments]
    main()
    sys.stdout.flush()
    # Without the interpreter's own exit, as in `run_ranks`.
    os._exit(0)


def none(rank: int) -> None:
    """Nothing is wrong."""


def data_end_in_a_loop(rank: int) -> None:
    """Rank 1 reads for ever."""
    if rank != 1:
        return
    loader = TokenStream.loader

    def endless(self, *more, **named):
        yield from itertools.islice(loader(self, *more, **named), 15)
        Path(BEGAN).touch()
        while True:
            pass

    TokenStream.loader = endless


def data_are_bad(rank: int) -> None:
    """Rank 1 alone meets something that it can name."""

    def refuse():
        raise DataError("it is bad")

    _at_micro_batch(15, rank == 1, refuse)


def step_holds_the_interpreter(rank: int) -> None:
    """Rank 1 computes something that never lets other threads run."""
    # `PyDLL` keeps the interpreter's lock, in this case for ever.
    _at_micro_batch(15, rank == 1, lambda: ctypes.PyDLL(None).sleep(10 * MOST_SECONDS))


def collective_is_skipped(rank: int) -> None:
    """Rank 0 joins a collective, and rank 1 goes on without."""
    _at_micro_batch(15, rank == 0, dist.barrier)


def _at_micro_batch(number: int, is_here: bool, action: Callable[[], object]) -> None:
    step, count = Trainer.training_step, 0

    def training_step(self, *more, **named):
        nonlocal count
        count += 1
        if is_here and count == number:
            Path(BEGAN).touch()
            action()
        return step(self, *more, **named)

    Trainer.training_step = training_step


def slow(rank: int) -> None:
    """Rank 1 is slow in every step, and sleeps for long in the first one, in saves and in evaluations."""
    if rank != 1:
        return
    long_seconds = 3.0
    step, save, evaluate = Trainer.training_step, Checkpointer.save, Trainer.evaluation_loop
    steps = 0

    def training_step(self, *more, **named):
        nonlocal steps
        steps += 1
        time.sleep(long_seconds if steps == 1 else 0.05)
        return step(self, *more, **named)

    def slow_save(trainer):
        time.sleep(long_seconds)
        return save(trainer)

    def evaluation_loop(self, *more, **named):
        time.sleep(long_seconds)
        return evaluate(self, *more, **named)

    Trainer.training_step, Trainer.evaluation_loop, Checkpointer.save = training_step, evaluation_loop, slow_save
