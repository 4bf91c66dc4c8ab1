"""What hashing adds to saving and loading; `python -m benchmarks.checkpoint_hash` writes its section of the results."""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.report import RESULTS, describe_machine, markdown, write_section
from hfdist.checkpoint import read_checkpoint, verify, write_checkpoint
from hfdist.checkpoint.manifest import check_hashes, read_manifest
from hfdist.checkpoint.piece import WEIGHT, Piece

NUM_PARAMETERS, ELEMENTS = 16, 1_050_000
KEYS = (WEIGHT, "exp_avg", "exp_avg_sq")
REPEATS = 5


def make_pieces() -> list[Piece]:
    """About 200 MB in float32: weights, and the state of Adam."""
    generator = torch.Generator().manual_seed(0)
    return [
        Piece(name=f"layer.{n}", key=key, shape=(ELEMENTS,), start=0, view=torch.randn(ELEMENTS, generator=generator))
        for n in range(NUM_PARAMETERS)
        for key in KEYS
    ]


def median_seconds(action: Callable[[], object]) -> float:
    """Of a few times, after one that does not count."""
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(folder: Path) -> list[list[str]]:
    """Rows of the table: what, seconds, and the share of hashing in it."""
    pieces = make_pieces()

    def save() -> Path:
        return write_checkpoint(folder, step=1, pieces=pieces, state={}, write_model_files=lambda path: None)

    path = save()
    parts = read_manifest(path).parts()
    megabytes = sum(part.num_bytes for part in parts) / 1e6
    hashing = median_seconds(lambda: check_hashes(path, parts))
    saving = median_seconds(save)
    verifying = median_seconds(lambda: verify(path))
    reading = median_seconds(lambda: read_checkpoint(path, pieces))
    loading = verifying + reading
    return [
        ["XXH3 of all files, from the page cache", f"{hashing:.2f}", f"{megabytes / hashing:.0f} MB/s"],
        [f"save of {megabytes:.0f} MB", f"{saving:.2f}", f"{100 * hashing / saving:.0f} %"],
        ["load: verify, then read", f"{loading:.2f}", f"{100 * verifying / loading:.0f} %"],
    ]


def main() -> None:
    """Measure in a temporary folder, with one thread."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        table = markdown(["one process", "seconds", "of which hashing"], measure(Path(name)))
    section = f"## What hashing adds to checkpoints\n\n{table}\n\n{describe_machine('torch')}"
    sys.stdout.write(section + "\n")
    write_section(RESULTS, "checkpoint-hash", section)


if __name__ == "__main__":
    main()
