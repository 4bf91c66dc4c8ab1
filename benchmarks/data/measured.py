"""One run of one contender in a process of its own: prepare, a whole epoch's part, or a resume. Prints JSON."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data.contenders import CONTENDERS, Loader, alone
from benchmarks.data.work import BATCH_SIZE, SEQUENCE_LENGTH, load_work
from benchmarks.rounds import cpu_seconds_of

_MOST_COMPARED_BATCHES = 16
_WARM_UP = 0.1
_STOP = 0.9


def main() -> None:
    """Take PHASE NUMBER FOLDER STARTED from `rounds`; STARTED by the monotonic clock."""
    phase, number, folder, started_seconds = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    contender = CONTENDERS[number]
    try:
        loader = contender.load()
    except ImportError as error:
        _report({"missing": str(error)})
        return
    # As `quick_imports` does for a training: a garbage collection of torch would hit some contender by chance.
    gc.freeze()
    work = load_work(folder)
    saved = folder / f"state-{number}.json"
    if phase == "prepare":
        with alone(folder, contender.loader):
            loader.prepare(work)
        _report({})
        return
    before_reset = time.monotonic()
    loader.reset(work)
    untimed_seconds = time.monotonic() - before_reset
    imported_seconds = time.monotonic()
    state = json.loads(saved.read_text()) if phase == "resume" else None
    batches = loader.batches(work, state)
    first = next(batches, None)
    if first is None:
        raise RuntimeError("nothing is left to read, not even what a buffer held when the state was kept")
    ready_seconds = time.monotonic()
    figures = {
        "first_seconds": ready_seconds - imported_seconds,
        "first_with_imports_seconds": ready_seconds - started_seconds - untimed_seconds,
    }
    num_batches = work.num_batches(tokenized=contender.tokenized)
    # Half of what is left, since some peers drop a little at the end of an epoch.
    num_compared = max(min(int((1 - _STOP) / 2 * num_batches), _MOST_COMPARED_BATCHES), 1)
    if phase == "whole":
        figures |= _read_epoch(loader, batches, saved, num_batches)
        compared = _take(batches, num_compared)
    else:
        compared = [first, *_take(batches, num_compared - 1)]
    _report(figures | {"digests": _digests(compared)})
    # What libraries do when they end is no part of it: `datasets` sleeps for 5 s.
    os._exit(0)


def _read_epoch(loader: Loader, batches: Iterator[Tensor], saved: Path, num_batches: int) -> dict[str, Any]:
    """Time the middle of an epoch, then keep the state at 90 % of it."""
    first, last = max(int(_WARM_UP * num_batches), 1), int(_STOP * num_batches)
    _pass(batches, first - 1)
    start_seconds = time.monotonic()
    cpu_seconds = cpu_seconds_of(partial(_pass, batches, last - first))
    wall_seconds = time.monotonic() - start_seconds
    saved.write_text(json.dumps(loader.state()))
    tokens = (last - first) * BATCH_SIZE * SEQUENCE_LENGTH
    return {"tokens": tokens, "wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds}


def _pass(batches: Iterator[Tensor], count: int) -> None:
    """Each batch is gone when the next comes, as in a training."""
    for _ in range(count):
        next(batches)


def _take(batches: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(batches) for _ in range(count)]


def _digests(batches: list[Tensor]) -> list[str]:
    for batch in batches:
        if batch.dtype != torch.int64 or tuple(batch.shape) != (BATCH_SIZE, SEQUENCE_LENGTH):
            raise RuntimeError(f"a batch of {batch.dtype}, {tuple(batch.shape)}")
    return [hashlib.blake2b(batch.numpy().tobytes(), digest_size=8).hexdigest() for batch in batches]


def _report(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
