"""Eight islands, one killed every 29 seconds: `python -m proofs.island_faults 900` prints a table.

These are 62 faults in 30 minutes, as torchft was shown with 32 groups. What counts are steps whose result is in the
weights of all; the same islands without faults are the measure. Islands sleep in each step: eight share the cores.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.distributed.island_runs import Island, before_steps, overrides_of, served
from tests.imports import import_all

NUM_ISLANDS, EVERY, STEP_SECONDS, FAULT_SECONDS = 8, 4, 1.0, 29.0
COMMON = ("islands=local_sgd", f"islands.every={EVERY}", "train.max_steps=100000", "checkpoint=none", "data.lanes=32",
          "train.global_batch_size=2", "train.micro_batch_size=2", "optimizer.schedule=constant",
          "train.eval_every=null")  # fmt: skip


def counted_steps(log: Path, begin: float, end: float) -> int:
    """Count the steps of all islands that were exchanged in a time."""
    found = 0
    for line in log.read_text().splitlines():
        seconds, _, text = line.partition(" ")
        members = re.fullmatch(r"step \d+: islands ([\d, ]+) exchange.*", text)
        if members is not None and begin <= float(seconds) < end:
            found += EVERY * len(members[1].split(","))
    return found


def kill(island: Island) -> None:
    """Kill all its processes."""
    processes = [*psutil.Process(island.process.pid).children(recursive=True), psutil.Process(island.process.pid)]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    island.process.join()


def train(seconds: float, *, with_faults: bool) -> tuple[float, int]:
    """Give the steps a second of all islands that count, and the number of faults."""
    choose, faults = random.Random(0), 0
    sleeps = before_steps(lambda step: time.sleep(STEP_SECONDS))
    with tempfile.TemporaryDirectory() as name, served(Path(name) / "log", silent_seconds=10) as address:
        folder, log = Path(name), Path(name) / "log"

        def start(index: int, turn: int) -> Island:
            own = overrides_of(address, index, NUM_ISLANDS, *COMMON)
            return Island(folder / f"{index}-{turn}", 1, *own, at_start=sleeps)

        islands = [start(index, 0) for index in range(NUM_ISLANDS)]
        while not log.is_file() or counted_steps(log, 0, float("inf")) < 2 * EVERY * NUM_ISLANDS:
            time.sleep(0.2)
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            time.sleep(0.1)
            if with_faults and time.monotonic() > begin + (faults + 1) * FAULT_SECONDS - FAULT_SECONDS / 2:
                index, faults = choose.randrange(NUM_ISLANDS), faults + 1
                kill(islands[index])
                islands[index] = start(index, faults)
        end = time.monotonic()
        for island in islands:
            kill(island)
        return counted_steps(log, begin, end) / (end - begin), faults


def table(seconds: float) -> str:
    """Both runs, one after the other."""
    whole, _ = train(seconds, with_faults=False)
    left, faults = train(seconds, with_faults=True)
    return "\n".join(
        [
            "| faults | minutes | steps a second of all islands | kept |",
            "|---:|---:|---:|---:|",
            f"| 0 | {seconds / 60:.1f} | {whole:.2f} | |",
            f"| {faults} | {seconds / 60:.1f} | {left:.2f} | {100 * left / whole:.1f} % |",
        ]
    )


if __name__ == "__main__":
    import_all()
    sys.stdout.write(f"{table(float(sys.argv[1]))}\n")
