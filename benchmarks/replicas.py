"""Replicas in memory beside checkpoints on the disk, written and read: `python -m benchmarks.replicas`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.rounds import interleave, median_fields
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.checkpoint import Keep, Replicas, Saver, find_newest, read_checkpoint
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.collectives import gather_json, rank, world_size
from hfdist.testing import run_ranks

NUM_RANKS = 2
ONE_MACHINE, TWO_MACHINES, TWO_WIPED, DISK = "memory", "memory of two machines", "the same, one machine lost", "disk"
MEMORY = Path("/dev/shm")


class Cost(NamedTuple):
    """Cost of a save and a start for the slowest rank."""

    stall_ms: float
    """Milliseconds of a save in which training stands still."""
    save_ms: float
    """Milliseconds until the save is whole."""
    start_ms: float
    """Milliseconds of a start, in which the state is found, verified and read."""


def main() -> None:
    """Measure and show."""
    options = read_options("replicas", __doc__, rounds=5)
    megabytes = 4 if options.quick else 32
    costs = run_ranks(_measure, NUM_RANKS, megabytes, options.rounds, timeout_seconds=600)[0]
    disk = costs[DISK]
    rows = [
        [
            name,
            *(f"{value:.0f}" for value in cost),
            f"{disk.save_ms / cost.save_ms:.1f}",
            f"{disk.start_ms / cost.start_ms:.1f}",
        ]
        for name, cost in costs.items()
    ]
    header = ["where", "stall ms", "save ms", "start ms", "disk's save / its", "disk's start / its"]
    text = (
        f"{NUM_RANKS} ranks of {megabytes} MiB each. A start finds the newest state, hashes all of it and reads it; "
        "what the disk holds is in the page cache. The two machines are two folders and gloo on one machine. "
        f"Medians of {options.rounds} interleaved rounds; the slowest rank counts."
    )
    section = "\n\n".join(
        ["## Replicas in memory", text, describe_run("benchmarks.replicas", "torch"), markdown(header, rows)]
    )
    measures = [
        Measure(what=f"{what} {name}", unit="ms", ours=getattr(costs[name], field), peers={DISK: getattr(disk, field)})
        for name in costs
        if name != DISK
        for what, field in (("save into", "save_ms"), ("start from", "start_ms"))
    ]
    publish(options, "replicas", section, measures)


def _measure(megabytes: int, rounds: int) -> dict[str, Cost]:
    turns = {
        DISK: partial(_on_disk, megabytes),
        ONE_MACHINE: partial(_in_memory, megabytes, [0] * NUM_RANKS, False),
        TWO_MACHINES: partial(_in_memory, megabytes, [*range(NUM_RANKS)], False),
        TWO_WIPED: partial(_in_memory, megabytes, [*range(NUM_RANKS)], True),
    }
    return {name: median_fields(costs) for name, costs in interleave(turns, rounds).items()}


def _pieces(megabytes: int) -> list[Piece]:
    size = megabytes * 2**18
    shape = (world_size(), size)
    return [Piece(name="a", key=WEIGHT, shape=shape, start=rank() * size, view=torch.full((size,), 1.0 + rank()))]


def _time(action: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    return max(gather_json(1e3 * (time.perf_counter() - begin)))


def _folder(parent: Path | None) -> Path:
    return Path(gather_json(tempfile.mkdtemp(prefix="hfdist-benchmark-", dir=parent) if rank() == 0 else None)[0])


def _save(saver: Saver, path: Path | None, step: int, pieces: list[Piece]) -> tuple[float, float]:
    """Twice, as memory for the copy is made once."""
    for number in (step, step + 1):
        dist.barrier()
        begin = time.monotonic()
        target = None if path is None else path / step_name(number)
        saver.save(target, step=number, pieces=pieces, state={}, keep=Keep(newest=1), begin_seconds=begin)
        saver.wait()
        report = saver.take_reports()[-1]
    return 1e3 * max(gather_json(report.stall_seconds)), 1e3 * max(gather_json(report.total_seconds))


def _on_disk(megabytes: int) -> Cost:
    folder, pieces = _folder(None), _pieces(megabytes)
    stall, total = _save(Saver(), folder, 1, pieces)

    def start() -> None:
        found = find_newest(folder)
        assert found is not None
        read_checkpoint(found, pieces)

    cost = Cost(stall, total, _time(start))
    _remove(folder)
    return cost


def _in_memory(megabytes: int, machines: list[int], is_wiped: bool) -> Cost:
    folder, pieces = _folder(MEMORY), _pieces(megabytes)
    own = folder / str(machines[rank()])
    own.mkdir(exist_ok=True)
    replicas = Replicas(own, folder / "checkpoints")
    replicas.begin_line(None)
    stall, total = _save(Saver(replicas=replicas), None, 1, pieces)
    dist.barrier()
    if is_wiped and rank() == world_size() - 1:
        shutil.rmtree(replicas.folder)

    def start() -> None:
        found = replicas.find(0)
        assert found is not None
        read_checkpoint(found, pieces, partial(replicas.fetch, found))

    cost = Cost(stall, total, _time(start))
    _remove(folder)
    return cost


def _remove(folder: Path) -> None:
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


if __name__ == "__main__":
    main()
