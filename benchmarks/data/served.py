"""One contender in a process of its own, which reads for as long as each line that it is sent says.

    python -m benchmarks.data.served LOADER OPTIONS FOLDER

Prints `ready` when it has read the first batches, then for each line with CPU seconds one with tokens a CPU second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.data.contenders import Contender
from benchmarks.data.work import BATCH_SIZE, SEQUENCE_LENGTH, load_work
from benchmarks.rounds import cpu_seconds

_WARM_UP_BATCHES = 30
_BATCHES_TOGETHER = 20


def main() -> None:
    """See above."""
    loader_name, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    loader = Contender("", "", "", True, loader_name, options).load()
    work = load_work(folder)
    loader.prepare(work)
    loader.reset(work)
    batches = loader.batches(work, None)
    for _ in range(_WARM_UP_BATCHES):
        if next(batches, None) is None:
            batches = loader.batches(work, None)
    print("ready", flush=True)
    for line in sys.stdin:
        spent, num_batches = 0.0, 0
        while spent < float(line):
            before, read = cpu_seconds(), 0
            while read < _BATCHES_TOGETHER and next(batches, None) is not None:
                read += 1
            spent += cpu_seconds() - before
            num_batches += read
            if read < _BATCHES_TOGETHER:
                # What the next epoch takes to begin is nobody's rate.
                batches = loader.batches(work, None)
                next(batches)
        print(num_batches * BATCH_SIZE * SEQUENCE_LENGTH / spent, flush=True)


if __name__ == "__main__":
    main()
