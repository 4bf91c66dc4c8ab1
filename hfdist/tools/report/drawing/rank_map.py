"""How long each rank is busy beside the others, as a map of ranks and steps: a stripe is a rank that is always slow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from hfdist.tools.report.drawing.frame import TOP, frame
from hfdist.tools.report.reading.rank_steps import Stretch
from hfdist.tools.report.text import escaped

_MOST_ROWS = 32
_MOST_COLUMNS = 48
_LEVELS = (0.9, 1.05, 1.15, 1.3, 1.6, 2.2)
"""Where one colour ends and the next begins, as a multiple of the median of all ranks."""


def draw(stretches: Sequence[Stretch], labels: Sequence[str]) -> str:
    """Give the map as HTML; nothing for one rank, or if no busy time is known, as on a GPU.

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
    a_row = -(-num_ranks // _MOST_ROWS)
    rows = [range(first, min(first + a_row, num_ranks)) for first in range(0, num_ranks, a_row)]
    cells = [[_highest(ratios, ranks) for ratios in columns] for ranks in rows]
    names = [labels[ranks[0]] if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}, the slowest" for ranks in rows]
    height = max(10, min(18, 320 // len(rows)))
    shown = range(0, len(rows), -(-len(rows) // 16))
    data = {
        "form": "map",
        "cells": ",".join("" if cell is None else f"{100 * cell:.0f}" for row in cells for cell in row),
        "names": escaped(json.dumps([name[:60] for name in names]), 16_000),
        "steps": f"{stretches[0].first_step:.0f},{stretches[-1].last_step:.0f}",
        "size": f"{len(columns)},{len(rows)}",
    }
    words = "A row is a rank, a column some steps. A stronger colour is a rank that is busy for longer than the others."
    return (
        f'<figure class="chart"><h3>Busy time beside the median of all ranks</h3>{_legend()}'
        + frame(
            labels=[(TOP + height * (row + 0.5), f"{rows[row][0]}") for row in shown],
            inner=_squares(cells, height * len(rows)),
            height=height * len(rows),
            words=("Busy time of ranks", words),
            data=data,
        )
        + f'<p class="axis">steps {data["steps"].replace(",", " to ")}; a row is a rank</p></figure>'
    )


def ratios_of(stretch: Stretch) -> list[float | None]:
    """Give the busy time of each rank as a multiple of the median; None: not known."""
    busy = stretch.busy()
    known = [value for value in busy if value is not None]
    middle = median(known) if known else 0.0
    return [None if value is None or middle <= 0 else value / middle for value in busy]


def _columns(stretches: Sequence[Stretch]) -> list[list[float | None]]:
    a_column = -(-len(stretches) // _MOST_COLUMNS)
    found = []
    for first in range(0, len(stretches), a_column):
        own = stretches[first : first + a_column]
        joined = Stretch(own[0].first_step, own[-1].last_step)
        for stretch in own:
            joined.join(stretch)
        found.append(ratios_of(joined))
    return found


def _highest(ratios: Sequence[float | None], ranks: range) -> float | None:
    known = [ratio for rank in ranks if rank < len(ratios) and (ratio := ratios[rank]) is not None]
    return max(known, default=None)


def _squares(cells: Sequence[Sequence[float | None]], height: int) -> str:
    """One path a colour, in which cells of one colour that lie side by side are one."""
    paths: dict[int, list[str]] = {}
    for row, own in enumerate(cells):
        column = 0
        levels = [None if cell is None else sum(cell > level for level in _LEVELS) for cell in own]
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
