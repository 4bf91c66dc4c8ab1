"""Which runs are made: layouts by ranks and by layers, corpora by size, saves; each in forked processes of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# These two are otherwise imported by the ranks themselves, as part of their start.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

import hfdist.trainer.trainer  # noqa: F401
from benchmarks.growth import control, corpora, files, saves, training
from hfdist.testing import run_ranks

GLOBAL_BATCH_SIZE, SEQUENCE_TOKENS = 8, 32
RANKS, LAYERS, TIMES = (1, 2, 4, 8), (2, 4, 8, 16, 32), (1, 10, 100)
CONTROL_RANKS, QUICK_CONTROL_RANKS = (16, 32, 64), (4, 8)
WATCH_RANKS, QUICK_WATCH_RANKS = (64, 1024, 4096, 16_384), (64, 1024)
SAVE_RANKS, QUICK_SAVE_RANKS = (64, 256, 1024, 4096, 16_384), (8, 16)
FILES, QUICK_FILES = (1_000, 10_000, 100_000), (100, 200)
QUICK_RANKS, QUICK_LAYERS, QUICK_TIMES = (1, 2), (2, 4), (1, 10)
QUICK_LAYOUTS = ("ddp", "zero2", "pipeline")
NUM_LAYER_RANKS = 2
SIZES = {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 8,
         "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": False}  # fmt: skip
THIN_SIZES = SIZES | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2,
                      "num_key_value_heads": 2}  # fmt: skip
_SECONDS, _FILES_SECONDS = 600, 3600

NOTHING_KEPT: dict[str, Any] = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
"""Keys of ZeRO-3 that free parameters after each use, as for a model that is larger than what may be kept."""
LAYOUTS: dict[str, Callable[[int], dict[str, Any] | None]] = {
    "ddp": lambda num_ranks: {},
    "zero1": lambda num_ranks: {"sharding": "zero1"},
    "zero2": lambda num_ranks: {"sharding": "zero2"},
    "zero3": lambda num_ranks: {"sharding": "zero3"},
    "zero3, nothing kept": lambda num_ranks: {
        "sharding": "zero3",
        "deepspeed": {"zero_optimization": dict(NOTHING_KEPT)},
    },
    "pipeline": lambda num_ranks: {"pipeline": num_ranks},
    "pipeline x zero1": lambda num_ranks: {"pipeline": num_ranks // 2, "sharding": "zero1"} if num_ranks > 2 else None,
}
"""Keys of `strategy.*` by the number of ranks; None: not at that number."""
LAYER_LAYOUTS = ("ddp", "zero3", "pipeline")
QUICK_LAYER_LAYOUTS = ("pipeline",)

ByRanks = dict[str, dict[int, list[training.Costs]]]
ByLayers = dict[str, dict[int, list[training.Costs]]]
ByTimes = dict[str, dict[int, corpora.Costs]]
ByControl = dict[str, dict[int, control.GroupCosts | control.WatchCosts]]
ByFiles = dict[str, dict[int, files.Costs]]
BySaves = dict[str, dict[int, saves.Costs]]


def run_by_ranks(layouts: Iterable[str], ranks: Sequence[int], num_steps: int) -> ByRanks:
    """The same global batch on more and more ranks. One rank is one process without a layout, for all alike."""
    alone = _train({}, 1, SIZES, num_steps, saves=True)
    return {
        name: {1: alone}
        | {
            num_ranks: _train(layout, num_ranks, SIZES, num_steps, saves=True)
            for num_ranks in ranks
            if num_ranks > 1 and (layout := LAYOUTS[name](num_ranks)) is not None
        }
        for name in layouts
    }


def run_by_layers(layouts: Iterable[str], layers: Sequence[int], num_steps: int) -> ByLayers:
    """Deeper and deeper models on two ranks."""
    return {
        name: {
            num_layers: _train(
                LAYOUTS[name](NUM_LAYER_RANKS) or {},
                NUM_LAYER_RANKS,
                THIN_SIZES | {"num_hidden_layers": num_layers},
                num_steps,
            )
            for num_layers in layers
        }
        for name in layouts
    }


def run_by_times(times: Sequence[int]) -> ByTimes:
    """Larger and larger corpora."""
    costs: ByTimes = {}
    with tempfile.TemporaryDirectory() as root:
        tokenizer = Path(root) / "tokenizer"
        corpora.make_tokenizer(tokenizer)
        for number, (name, (kind, write)) in enumerate(corpora.WRITERS.items()):
            costs[name] = {}
            for factor in times:
                folder = Path(root) / f"{number}-{factor}"
                write(folder, tokenizer, factor)
                (costs[name][factor],) = run_ranks(
                    corpora.measure, 1, folder, tokenizer, kind, group=False, timeout_seconds=_SECONDS
                )
    return costs


def run_control(ranks: Sequence[int], watched: Sequence[int], machine_ranks: int) -> ByControl:
    """More and more ranks: real ones in control groups, faked ones in the watch; and in one mesh, and in one star."""

    def group(num_ranks: int, of_machine: int) -> control.GroupCosts:
        costs = run_ranks(control.measure_group, num_ranks, of_machine, timeout_seconds=_SECONDS)
        assert isinstance(costs[0], control.GroupCosts)
        return costs[0]

    return {
        "control group": {n: group(n, machine_ranks) for n in ranks},
        "one mesh of all ranks": {n: group(n, n) for n in ranks},
        "watch": {n: control.measure_watch(n, machine_ranks) for n in watched},
        "watch, rank 0 hears each": {n: control.measure_watch(n, n) for n in watched},
    }


def run_by_files(counts: Sequence[int]) -> ByFiles:
    """More and more files."""

    def measure(kind: str, num_files: int) -> files.Costs:
        with tempfile.TemporaryDirectory() as root:
            [costs] = run_ranks(
                files.measure, 1, Path(root), kind, num_files, group=False, timeout_seconds=_FILES_SECONDS
            )
        assert isinstance(costs, files.Costs)
        return costs

    return {kind: {num_files: measure(kind, num_files) for num_files in counts} for kind in files.WRITERS}


def run_saves(layouts: Iterable[str], ranks: Sequence[int]) -> BySaves:
    """More and more ranks that save one state."""

    def measure(layout: str, num_ranks: int) -> saves.Costs:
        [costs] = run_ranks(saves.measure, 1, layout, num_ranks, group=False, timeout_seconds=_SECONDS)
        assert isinstance(costs, saves.Costs)
        return costs

    return {layout: {num_ranks: measure(layout, num_ranks) for num_ranks in ranks} for layout in layouts}


def _train(
    layout: dict[str, Any], num_ranks: int, sizes: dict[str, Any], num_steps: int, *, saves: bool = False
) -> list[training.Costs]:
    work = training.Work(
        layout=layout,
        sizes=sizes,
        global_batch_size=GLOBAL_BATCH_SIZE,
        sequence_tokens=SEQUENCE_TOKENS,
        num_steps=num_steps,
        saves=saves,
    )
    costs: list[training.Costs] = run_ranks(
        training.train, num_ranks, work, timeout_seconds=_SECONDS, group=num_ranks > 1
    )
    return costs
