"""One contender in a process of its own, which reads for as long as each line that it is sent says.

    python -m benchmarks.data.served LOADER OPTIONS FOLDER

Answers `ready` when it has read the first batches, then each line of CPU seconds with tokens a CPU second.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.contenders import alone, load
from benchmarks.data.work import BATCH_SIZE, SEQUENCE_LENGTH, load_work
from benchmarks.rounds import cpu_seconds_of

ANSWER = "benchmark: "
"""Prefix of each answer, as libraries write to the same place."""
_WARM_UP_BATCHES = 30
_ENOUGH = 0.25
"""Share of the wanted CPU seconds after which an epoch's end ends the turn: one of `datasets` takes 5 s of waiting."""


def main() -> None:
    """See above."""
    loader_name, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    loader = load(loader_name, options)
    # As `quick_imports` does for a training: a garbage collection of torch is no part of a rate.
    gc.freeze()
    work = load_work(folder)
    # Readers that start together share what one of them writes.
    with alone(folder, loader_name):
        loader.prepare(work)
    loader.reset(work)
    batches = loader.batches(work, None)
    for _ in range(_WARM_UP_BATCHES):
        if next(batches, None) is None:
            batches = loader.batches(work, None)
    print(f"{ANSWER}ready", flush=True)
    for line in sys.stdin:
        wanted, spent, num_batches = float(line), 0.0, 0
        while spent < _ENOUGH * wanted:
            taken = _Taken()
            spent += cpu_seconds_of(partial(taken.read, batches, wanted - spent))
            num_batches += taken.num_batches
            if taken.is_epoch_over:
                # What the next epoch takes to begin is nobody's rate.
                batches = loader.batches(work, None)
                next(batches)
        print(f"{ANSWER}{num_batches * BATCH_SIZE * SEQUENCE_LENGTH / spent}", flush=True)


class _Taken:
    """How much was read at a stretch, so that what threads and workers read ahead meanwhile is counted, too."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.is_epoch_over = False

    def read(self, batches: Iterator[Any], cpu_seconds: float) -> None:
        """Read for so long in this process, or to the end; each batch is gone when the next comes, as in a training."""
        end_seconds = time.process_time() + cpu_seconds
        while time.process_time() < end_seconds:
            if next(batches, None) is None:
                self.is_epoch_over = True
                return
            self.num_batches += 1


if __name__ == "__main__":
    main()
