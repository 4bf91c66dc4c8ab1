"""A run with a save every other step for half an hour, and what its ranks hold on to meanwhile.

`python -m proofs.soak docs/soak.md 30` takes 30 minutes, writes the table, and fails where something grows.
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

import psutil
import torch
import transformers

from tests.distributed.injected_faults import Ranks
from tests.imports import import_all

NUM_RANKS, SAVE_EVERY = 2, 2
ROWS = 15
SAMPLES_PER_ROW = 8
OVERRIDES = (
    "strategy.sharding=zero2",
    "train.max_steps=10000000",
    "train.eval_every=50",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    f"checkpoint.every={SAVE_EVERY}",
)
MOST_KIBIBYTES_PER_SAVE = 16.0
"""Of what is measured in MiB: the slope of a line through the rows of the second half."""
MOST_GROWTH = 2
"""Of what is counted: from the first row of the second half to the last."""
WHAT_FILLS_UP = """\
What fills up and then stays, so that it shows as a step in the table:

* the history that a run holds: fewer than 4,000 entries, here for the last 1,000 to 2,000 steps;
* torch's flight recorder: the last 2,000 collectives of each rank;
* what reading all of that recorder takes, 15 to 30 MiB a rank: once a rank has been idle for longer than a beat of the
  watch, which asks it what the rank waits for;
* in a loader process what its tokenizer takes, from the first document on whose tokens are not cached yet.
"""
SHARED = Path("/dev/shm")
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Sample:
    """What is held at one moment, by the rank that holds most of it."""

    rank_mib: float
    """Resident, with pages that it shares."""
    loader_mib: float
    """Likewise, of its loader process."""
    descriptors: int
    """Of both, like the two below."""
    threads: int
    processes: int
    shared_files: int
    """In /dev/shm, of the machine."""
    shared_mib: float
    run_mib: float
    """Of the run folder."""


def sample(ranks: Ranks) -> Sample:
    """Look at all ranks."""
    main = [psutil.Process(process.pid) for process in ranks.processes]
    families = [[process, *process.children(recursive=True)] for process in main]
    memory = [[process.memory_info().rss / MEBIBYTE for process in family] for family in families]
    shared = [path.stat().st_size for path in SHARED.rglob("*") if path.is_file()]
    return Sample(
        rank_mib=max(family[0] for family in memory),
        loader_mib=max(sum(family[1:]) for family in memory),
        descriptors=max(sum(process.num_fds() for process in family) for family in families),
        threads=max(sum(process.num_threads() for process in family) for family in families),
        processes=max(map(len, families)),
        shared_files=len(shared),
        shared_mib=sum(shared) / MEBIBYTE,
        run_mib=_folder_bytes(ranks.run_dir) / MEBIBYTE,
    )


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


def growth(rows: list[tuple[float, int, Sample]]) -> dict[str, float]:
    """Give the growth of each value over the second half: in KiB a save of those in MiB, of the others in whole."""
    half = rows[len(rows) // 2 :]
    saves = [steps / SAVE_EVERY for _, steps, _ in half]
    grown = {}
    for field in fields(Sample):
        values = [getattr(held, field.name) for _, _, held in half]
        is_size = field.name.endswith("_mib")
        grown[field.name] = (
            1024 * statistics.linear_regression(saves, values).slope if is_size else values[-1] - values[0]
        )
    return grown


def too_much(rows: list[tuple[float, int, Sample]]) -> list[str]:
    """Name what grew beyond its bound."""
    return [
        f"{name}: by {grown:.1f}{' KiB a save' if name.endswith('_mib') else ''}"
        for name, grown in growth(rows).items()
        if grown > (MOST_KIBIBYTES_PER_SAVE if name.endswith("_mib") else MOST_GROWTH)
    ]


def describe(rows: list[tuple[float, int, Sample]]) -> str:
    """Write the document."""
    minutes, steps, _ = rows[-1]
    verdict, grown = too_much(rows), growth(rows)
    heads = ["minutes", "steps", "rank, MiB", "loader, MiB", "descriptors", "threads", "processes", "files in /dev/shm"]
    heads += ["MiB there", "run folder, MiB"]
    lines = [
        "# What a long run holds on to",
        "",
        f"{NUM_RANKS} gloo ranks with ZeRO-2 that save every {SAVE_EVERY} steps and evaluate every 50:",
        f"{steps:,} steps and {steps // SAVE_EVERY:,} saves in {minutes:.0f} minutes. Of the rank that holds more;",
        "memory is resident, with pages that are shared. Each row has the medians of its stretch.",
        "",
        "```\nmake soak\n```",
        "",
        f"Over the second half of the rows a rank grew by {grown['rank_mib']:.1f} KiB a save, its loader process by "
        f"{grown['loader_mib']:.1f}, the run folder by {grown['run_mib']:.1f}.",
        f"The bound is {MOST_KIBIBYTES_PER_SAVE:.0f} KiB a save, and {MOST_GROWTH} of what is counted: "
        + (f"exceeded by {', '.join(verdict)}." if verdict else "nothing exceeds it."),
        "",
        WHAT_FILLS_UP,
        f"Written by `make soak` with torch {torch.__version__.split('+')[0]}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for minute, step, held in rows:
        cells = [f"{minute:.1f}", f"{step:,}", f"{held.rank_mib:.1f}", f"{held.loader_mib:.1f}"]
        cells += [f"{count:.0f}" for count in (held.descriptors, held.threads, held.processes, held.shared_files)]
        cells += [f"{held.shared_mib:.1f}", f"{held.run_mib:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import_all()
    measured, said = soak(float(sys.argv[2]) if len(sys.argv) > 2 else 30.0)
    Path(sys.argv[1]).write_text(describe(measured), encoding="utf-8")
    if too_much(measured):
        sys.exit(f"{too_much(measured)}\n{said[-2000:]}")
