"""A map of the busy time of ranks: a row a rank, a column some steps. A rank that is always slow is a stripe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from math import ceil
from statistics import median

from hfdist.tools.report.drawing.frame import TOP, frame
from hfdist.tools.report.reading.rank_steps import Stretch, join_stretches
from hfdist.tools.report.text import escaped

_MOST_ROWS = 32
"""Most rows: with more ranks, a row shows the slowest of some neighbours."""
_MOST_COLUMNS = 48
_MOST_LABELS = 16
_LEVELS = (0.9, 1.05, 1.15, 1.3, 1.6, 2.2)
"""Busy times at which a stronger colour begins, each a multiple of the median of all ranks."""


def draw(stretches: Sequence[Stretch], labels: Sequence[str]) -> str:
    """Give the map as HTML, or an empty text for one rank, or if no busy time is known, as on a GPU.

    Args:
        stretches: the stretches of the run, in order.
        labels: a label for each rank, of unknown origin.
    """
    num_ranks = max((len(stretch.busy()) for stretch in stretches), default=0)
    if num_ranks < 2:
        return ""
    columns = _columns(stretches)
    if not any(ratio is not None for ratios in columns for ratio in ratios):
        return ""
    ranks_a_row = ceil(num_ranks / _MOST_ROWS)
    rows = [range(first, min(first + ranks_a_row, num_ranks)) for first in range(0, num_ranks, ranks_a_row)]
    cells = [[_highest(ratios, ranks) for ratios in columns] for ranks in rows]
    names = [labels[ranks[0]] if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}, the slowest" for ranks in rows]
    # Pixels: a map of few ranks stays low, and one of many ranks is about 320 high.
    row_height = max(10, min(18, 320 // len(rows)))
    labelled = range(0, len(rows), ceil(len(rows) / _MOST_LABELS))
    first_step, last_step = f"{stretches[0].first_step:.0f}", f"{stretches[-1].last_step:.0f}"
    data = {
        "form": "map",
        "cells": ",".join("" if cell is None else f"{100 * cell:.0f}" for row in cells for cell in row),
        "names": escaped(json.dumps([name[:60] for name in names]), 16_000),
        "steps": f"{first_step},{last_step}",
        "size": f"{len(columns)},{len(rows)}",
    }
    words = "A row is a rank, a column some steps. A stronger colour is a rank that is busy for longer than the others."
    return (
        f'<figure class="chart"><h3>Busy time beside the median of all ranks</h3>{_legend()}'
        + frame(
            labels=[(TOP + row_height * (row + 0.5), f"{rows[row][0]}") for row in labelled],
            inner=_squares(cells, row_height * len(rows)),
            height=row_height * len(rows),
            words=("Busy time of ranks", words),
            data=data,
        )
        + f'<p class="axis">steps {first_step} to {last_step}; a row is a rank</p></figure>'
    )


def busy_ratios(stretch: Stretch) -> list[float | None]:
    """Give the busy time of each rank as a multiple of the median of all ranks; None: not known."""
    busy = stretch.busy()
    known = [seconds for seconds in busy if seconds is not None]
    middle = median(known) if known else 0.0
    return [None if seconds is None or middle <= 0 else seconds / middle for seconds in busy]


def _columns(stretches: Sequence[Stretch]) -> list[list[float | None]]:
    """Give the ratios of all ranks for each column, in which neighbouring stretches are joined if they are many."""
    a_column = ceil(len(stretches) / _MOST_COLUMNS)
    firsts = range(0, len(stretches), a_column)
    return [busy_ratios(join_stretches(stretches[first : first + a_column])) for first in firsts]


def _highest(ratios: Sequence[float | None], ranks: range) -> float | None:
    """Give the highest ratio of these ranks; None: none is known."""
    # A slice, as a stretch need not have all ranks.
    known = [ratio for ratio in ratios[ranks.start : ranks.stop] if ratio is not None]
    return max(known, default=None)


def _squares(cells: Sequence[Sequence[float | None]], height: int) -> str:
    """Draw the cells as one path a colour, in which neighbours of one colour in a row are one box."""
    paths: dict[int, list[str]] = {}
    for row, ratios in enumerate(cells):
        column = 0
        levels = [None if ratio is None else sum(ratio > level for level in _LEVELS) for ratio in ratios]
        for level, same in groupby(levels):
            width = len(list(same))
            if level is not None:
                paths.setdefault(level, []).append(f"M{column} {row}h{width}v1h-{width}z")
            column += width
    drawn = "".join(f'<path class="heat h{level}" d="{"".join(parts)}"/>' for level, parts in sorted(paths.items()))
    box = f"0 0 {len(cells[0])} {len(cells)}"
    shape = f'y="{TOP}" width="100%" height="{height}" viewBox="{box}" preserveAspectRatio="none"'
    return f'<svg class="data" {shape}>{drawn}</svg>'


def _legend() -> str:
    words = ["below 0.9", *(f"from {level}" for level in _LEVELS)]
    items = "".join(f'<li class="h{level}"><i></i>{text}</li>' for level, text in enumerate(words))
    return f'<ul class="legend heats">{items}</ul>'
