"""A run with a save every other step for half an hour, and what its ranks hold on to meanwhile.

`python -m tests.distributed.soak docs/soak.md 30` takes 30 minutes, writes the table, and fails where something grows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import transformers

from tests.distributed.astray import Ranks

NUM_RANKS, SAVE_EVERY = 2, 2
ROWS = 15
SAMPLES_PER_ROW = 8
OVERRIDES = (
    "strategy.sharding=zero2",
    "train.max_steps=10000000",
    "train.eval_every=50",
    "train.global_batch_size=4",
    f"checkpoint.every={SAVE_EVERY}",
)
MOST_GROWTH_MIB, MOST_GROWTH = 16.0, 2
"""From the second row to the last: of a rank's memory, and of what is counted. The first row starts up."""
SHARED = Path("/dev/shm")
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Sample:
    """What is held at one moment; of processes, of that rank and its loader process together."""

    rss_mib: float
    """Of the largest rank; with pages that it shares."""
    pss_mib: float
    """Of the largest rank; of shared pages its part."""
    descriptors: int
    threads: int
    processes: int
    shared_files: int
    """In /dev/shm, of the machine."""
    shared_mib: float
    run_mib: float
    """Of the run folder."""


def sample(ranks: Ranks) -> Sample:
    """Look at all ranks."""
    families = [_family(int(process.pid or 0)) for process in ranks.processes]
    memory = [[_memory_mib(pid) for pid in family] for family in families]
    shared = [path.stat().st_size for path in SHARED.rglob("*") if path.is_file()]
    return Sample(
        rss_mib=max(sum(rss for rss, _ in family) for family in memory),
        pss_mib=max(sum(pss for _, pss in family) for family in memory),
        descriptors=max(sum(_count(pid, "fd") for pid in family) for family in families),
        threads=max(sum(_count(pid, "task") for pid in family) for family in families),
        processes=max(map(len, families)),
        shared_files=len(shared),
        shared_mib=sum(shared) / MEBIBYTE,
        run_mib=_folder_bytes(ranks.run_dir) / MEBIBYTE,
    )


def _family(pid: int) -> list[int]:
    """Give the process and its descendants."""
    children = [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]
    return [pid, *(member for child in children for member in _family(child))]


def _memory_mib(pid: int) -> tuple[float, float]:
    words = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    kibibytes = {name: int(number) for name, number, *_ in words}
    return kibibytes["Rss:"] / 1024, kibibytes["Pss:"] / 1024


def _count(pid: int, folder: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{folder}"))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pruned, or renamed, meanwhile
                total += os.stat(os.path.join(root, name)).st_size
    return total


def soak(minutes: float) -> tuple[list[tuple[float, int, Sample]], str]:
    """Give a row per stretch (minutes since the start, steps done, medians), and what the ranks wrote."""
    rows: list[tuple[float, int, Sample]] = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), NUM_RANKS, list(OVERRIDES), _share_what_is_inherited)
        try:
            while ranks.steps < 10:
                assert all(process.is_alive() for process in ranks.processes), ranks.said
                time.sleep(1)
            began = time.monotonic()
            for row in range(ROWS):
                samples = []
                for number in range(SAMPLES_PER_ROW):
                    due = began + 60 * minutes * (row + (number + 1) / SAMPLES_PER_ROW) / ROWS
                    time.sleep(max(0.0, due - time.monotonic()))
                    samples.append(sample(ranks))
                medians = (statistics.median(values) for values in zip(*map(astuple, samples), strict=True))
                rows.append(((time.monotonic() - began) / 60, ranks.steps, Sample(*medians)))
                sys.stderr.write(f"{rows[-1]}\n")
            ranks.send(signal.SIGTERM, 0)
            codes = ranks.end()
            assert codes == [75] * NUM_RANKS, f"{codes}\n{ranks.said}"
            return rows, ranks.said
        finally:
            ranks.kill()


def _share_what_is_inherited(rank: int) -> None:
    """Else the first collection of each rank copies it, which would look like growth."""
    gc.freeze()


def growth(rows: list[tuple[float, int, Sample]]) -> list[str]:
    """Name what grew, from the second row to the last."""
    first, last = rows[1][2], rows[-1][2]
    found = []
    for field in fields(Sample):
        grown = getattr(last, field.name) - getattr(first, field.name)
        if grown > (MOST_GROWTH_MIB if field.name.endswith("mib") else MOST_GROWTH):
            found.append(f"{field.name}: by {grown:.1f}")
    return found


def describe(rows: list[tuple[float, int, Sample]]) -> str:
    """Write the document."""
    minutes, steps, _ = rows[-1]
    grown = growth(rows)
    verdict = "grew: " + ", ".join(grown) if grown else "nothing grew"
    heads = ("minutes", "steps", "RSS, MiB", "PSS, MiB", "descriptors", "threads", "processes", "files in /dev/shm")
    heads += ("MiB there", "run folder, MiB")
    lines = [
        "# What a long run holds on to",
        "",
        f"{NUM_RANKS} gloo ranks with ZeRO-2 that save every {SAVE_EVERY} steps and evaluate every 50:",
        f"{steps:,} steps and {steps // SAVE_EVERY:,} saves in {minutes:.0f} minutes. Of the rank that holds more,",
        "with its loader process; each row has the medians of its stretch.",
        f"From the second row to the last, {verdict}.",
        f"Written by `make soak` with torch {torch.__version__.split('+')[0]}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for minute, step, held in rows:
        cells = [f"{minute:.1f}", f"{step:,}", f"{held.rss_mib:.1f}", f"{held.pss_mib:.1f}"]
        cells += [f"{count:.0f}" for count in (held.descriptors, held.threads, held.processes, held.shared_files)]
        cells += [f"{held.shared_mib:.1f}", f"{held.run_mib:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measured, said = soak(float(sys.argv[2]) if len(sys.argv) > 2 else 30.0)
    Path(sys.argv[1]).write_text(describe(measured), encoding="utf-8")
    if growth(measured):
        sys.exit(f"{growth(measured)}\n{said[-2000:]}")
