"""How costs grow with ranks, layers, the corpus and its files; a save and control with thousands of ranks.

python -m benchmarks.growth --write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.growth import control, runs, saves
from benchmarks.growth.plots import draw_ranks
from benchmarks.growth.tables import (
    control_section,
    corpora_section,
    files_section,
    layers_section,
    ranks_section,
    saves_section,
)
from benchmarks.table import Measure, describe_run, publish, read_options

_PICTURE = Path(__file__).with_name("ranks.png")


class Part(NamedTuple):
    """One thing that grows."""

    run: Callable[[argparse.Namespace], Any]
    describe: Callable[[Any], tuple[str, list[Measure]]]


def _run_ranks(options: argparse.Namespace) -> runs.ByRanks:
    layouts, ranks = (runs.QUICK_LAYOUTS, runs.QUICK_RANKS) if options.quick else (runs.LAYOUTS, runs.RANKS)
    return runs.run_by_ranks(layouts, ranks, options.rounds)


def _run_layers(options: argparse.Namespace) -> runs.ByLayers:
    layouts, layers = runs.LAYER_LAYOUTS, runs.LAYERS
    if options.quick:
        layouts, layers = runs.QUICK_LAYER_LAYOUTS, runs.QUICK_LAYERS
    return runs.run_by_layers(layouts, layers, options.rounds)


def _run_corpora(options: argparse.Namespace) -> runs.ByTimes:
    return runs.run_by_times(runs.QUICK_TIMES if options.quick else runs.TIMES)


def _run_files(options: argparse.Namespace) -> runs.ByFiles:
    return runs.run_by_files(runs.QUICK_FILES if options.quick else runs.FILES)


def _run_saves(options: argparse.Namespace) -> runs.BySaves:
    return runs.run_saves(saves.LAYOUTS, runs.QUICK_SAVE_RANKS if options.quick else runs.SAVE_RANKS)


def _run_control(options: argparse.Namespace) -> runs.ByControl:
    if options.quick:
        return runs.run_control(runs.QUICK_CONTROL_RANKS, runs.QUICK_WATCH_RANKS, machine_ranks=2)
    return runs.run_control(runs.CONTROL_RANKS, runs.WATCH_RANKS, control.MACHINE_RANKS)


PARTS = {
    "ranks": Part(_run_ranks, ranks_section),
    "layers": Part(_run_layers, layers_section),
    "corpora": Part(_run_corpora, corpora_section),
    "files": Part(_run_files, files_section),
    "saves": Part(_run_saves, saves_section),
    "control": Part(_run_control, control_section),
}


def main() -> None:
    """Measure all parts, or those that are named; each has a section of its own."""
    parts: dict[str, Any] = {"nargs": "+", "choices": PARTS, "default": list(PARTS), "help": "what grows"}
    options = read_options("growth", __doc__, rounds=7, parts=parts)
    measures: list[Measure] = []
    for name in options.parts:
        part = PARTS[name]
        measured = part.run(options)
        text, rows = part.describe(measured)
        run = describe_run("benchmarks.growth", "torch", "deepspeed", "transformers")
        section = f"## Growth with {name}\n\n{text}\n\n{run}"
        if name == "ranks":
            section += f"\n\n![growth with ranks](growth/{_PICTURE.name})"
            if options.write:
                draw_ranks(measured, _PICTURE)
        measures += rows
        publish(options, f"growth_{name}", section, measures)


if __name__ == "__main__":
    main()
