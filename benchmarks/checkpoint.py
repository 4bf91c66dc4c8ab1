"""Saving one model in one run: how long training stands still, and until all is on the disk; beside peers and limits.

python -m benchmarks.checkpoint --write
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint_savers import (
    DCP,
    DCP_CACHED,
    DEEPSPEED,
    HF_TRAINER,
    LIMIT_COPY,
    LIMIT_WRITE,
    LIMIT_WRITE_UNSYNCED,
    OURS,
    OURS_TRAINER,
    Save,
    Times,
    alone,
    replicated,
    sharded,
    sizes,
)
from benchmarks.rounds import interleave, median_fields
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.collectives import gather_json
from hfdist.testing import run_ranks

NUM_RANKS = 2
LIMITS = (LIMIT_COPY, LIMIT_WRITE, LIMIT_WRITE_UNSYNCED)
MOST_COPIES, MOST_WRITES = 1.2, 2.0
"""The goals: a stall in copies in memory, and a save in synced writes of the same bytes."""


def main() -> None:
    """Measure all in one folder, which goes with all that savers leave, show the tables, and write them if asked to."""
    options = read_options("checkpoint", __doc__, rounds=5)
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        # Ranks are forks, and find their folders by it.
        tempfile.tempdir = folder
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rounds = options.rounds
    several: dict[str, Times] = {}
    # First: what follows starts threads, which a fork would not take along.
    for contenders in () if options.quick else (replicated, sharded):
        several |= run_ranks(measure, NUM_RANKS, contenders, False, rounds, timeout_seconds=600)[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = measure(alone, options.quick, rounds)
    dist.destroy_process_group()
    publish(options, "checkpoint", _section(options, one, several, rounds), _measures(one, several))


def measure(contenders: Callable[[bool], dict[str, Save]], quick: bool, rounds: int) -> dict[str, Times]:
    """Save in turn with each contender, over and over; give the medians."""
    figures = interleave({name: _in_a_folder(save) for name, save in contenders(quick).items()}, rounds)
    return {name: median_fields(turns) for name, turns in figures.items()}


def _in_a_folder(save: Save) -> Callable[[], Times]:
    """Save into a new folder all ranks share, with a disk that has nothing else to do; the slowest rank counts."""

    def run() -> Times:
        names = gather_json(tempfile.mkdtemp(prefix="checkpoint-") if dist.get_rank() == 0 else None)
        folder = Path(names[0])
        os.sync()
        dist.barrier()
        own = save(folder)
        slowest = Times(*(max(values) for values in zip(*gather_json(own), strict=True)))
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
        return slowest

    return run


def _measures(one: dict[str, Times], several: dict[str, Times]) -> list[Measure]:
    rows = []
    for ours, peers, measured in (
        (OURS, (DCP_CACHED, DCP), one),
        (OURS_TRAINER, (HF_TRAINER, DEEPSPEED), one),
        (OURS, (DCP_CACHED,), several),
    ):
        if ours not in measured:
            continue
        what = f"{ours}{f', {NUM_RANKS} ranks, ddp' if measured is several else ''}"
        stall, total = (
            Measure(
                what=f"{kind} of a save by {what}",
                unit="ms",
                ours=getattr(measured[ours], field),
                peers=_field(measured, peers, field),
                limits=_field(measured, limits, field),
                goal=f"<= {goal:g}x {limits[0]}",
                is_met=getattr(measured[ours], field) <= goal * getattr(measured[limits[0]], field),
            )
            for kind, field, limits, goal in (
                ("stall", "stall_ms", (LIMIT_COPY,), MOST_COPIES),
                ("total", "total_ms", (LIMIT_WRITE, LIMIT_WRITE_UNSYNCED), MOST_WRITES),
            )
        )
        rows += [stall, total]
    return rows


def _field(measured: dict[str, Times], names: tuple[str, ...], field: str) -> dict[str, float | str]:
    return {name: getattr(measured[name], field) for name in names if name in measured}


def _section(options: argparse.Namespace, one: dict[str, Times], several: dict[str, Times], rounds: int) -> str:
    parts = [
        "## Saving a checkpoint",
        f"A Llama with AdamW's moments in float32, {sizes(options.quick):.0f} MiB of state. Stall: for how long "
        "training stands still, the plan and what ranks tell each other included; of DCP the call of `async_save` "
        "alone, with a state dict that is there. Total: until the call, or what it left running, has ended, nothing "
        "else going on. "
        "hfdist's is on the disk by then (every file synced, hashed and in a manifest, the folder renamed), and DCP "
        "syncs its files; those of the HF Trainer and DeepSpeed are not synced. A copy and a "
        "write are of one rank's share, flat, without any format, from and into memory that is there. The HF "
        "Trainer's is its `_save_checkpoint`; with DeepSpeed, what that calls (`save_pretrained` and the engine's "
        "`save_checkpoint`, ZeRO-2). `os.sync` before each; wall clock, one thread a process; the slowest rank counts. "
        "Medians of "
        f"{rounds} interleaved rounds after one to warm up.",
        f"{describe_run('benchmarks.checkpoint', 'torch', 'deepspeed', 'transformers', 'safetensors')}",
        "One process:",
        _table(one),
    ]
    if several:
        parts += [f"{NUM_RANKS} processes, of which each writes half:", _table(several)]
    return "\n\n".join(parts)


def _table(measured: dict[str, Times]) -> str:
    copy, write, unsynced = (measured[name] for name in LIMITS)
    rows = []
    for name, times in measured.items():
        # Of a write the stall is that of a program that waits for it.
        rows.append(
            [
                name,
                f"{times.stall_ms:.1f}",
                f"{times.stall_ms / copy.stall_ms:.2f}",
                f"{times.total_ms:.0f}",
                f"{times.total_ms / write.total_ms:.2f}",
                f"{times.total_ms / unsynced.total_ms:.2f}",
            ]
        )
    header = ["saver", "stall ms", "x copy", "total ms", "x synced write", "x write"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
