"""Draw a measured schedule: ranks by time, one box for each forward and backward of a micro batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hfdist.pipeline.timeline import COMPUTE, Action, Event, busy_by_rank

# Strong colours compute, grey is the bubble. Chosen so that any two, in either shade, stay well apart (20 and more in
# CIELAB) for the eye and for its three kinds of colour blindness.
IDLE = "#EDEDED"
COLOURS = {
    Action.forward: "#332288",
    Action.backward: "#228833",
    Action.backward_input: "#E69F00",
    Action.backward_weight: "#882255",
    Action.send: "#000000",
    Action.wait: IDLE,
}
BAR_HEIGHT = 0.84
LARGEST_POINTS, SMALLEST_POINTS = 9.0, 4.5
DIGIT_WIDTH = 0.64
"""Width of a digit, as a share of the size of the font."""


def draw(events: Sequence[Event], path: Path, *, title: str, formula: float) -> Path:
    """Draw events as `build_figure` does, into a file of the kind that the suffix of `path` says; give `path`."""
    build_figure(events, title=title, formula=formula).savefig(path, dpi=150)
    return path


def build_figure(events: Sequence[Event], *, title: str, formula: float) -> Figure:
    """Lay out ranks by time: a bar for each event, its micro batch in it, a lighter shade for later stages of a rank.

    Args:
        events: of all ranks; at least one.
        title: what ran, e.g. the schedule and its numbers of stages and micro batches.
        formula: the bubble that the schedule would have with stages of one speed, as a fraction.
    """
    busy = busy_by_rank(list(events))
    stages = {
        rank: sorted({event.stage for event in events if event.rank == rank and event.action in COMPUTE})
        for rank in busy
    }
    last_ms = 1e3 * max(event.stop_seconds for event in events)
    # A Figure of its own, without pyplot, needs no display and leaves no state.
    figure = Figure(figsize=(_width_inches(events), 1.8 + 0.45 * len(busy)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, last_ms)
    _label_rows(axes, busy, stages)
    axes.set_xlabel("milliseconds since the start of the step")
    figure.suptitle(title, fontweight="bold")
    bubble = 1 - fmean(busy.values())
    axes.set_title(f"bubble: {bubble:.1%} measured, {formula:.1%} by the formula", fontsize="medium")
    row = {rank: index for index, rank in enumerate(stages)}
    axes.barh(list(row.values()), last_ms, height=BAR_HEIGHT, color=IDLE, zorder=0, label="idle")
    handles = []
    for order, action in enumerate(Action, start=1):
        drawn = [event for event in events if event.action is action]
        edge = _edge(action)
        axes.barh(
            [row[event.rank] for event in drawn],
            [1e3 * (event.stop_seconds - event.start_seconds) for event in drawn],
            left=[1e3 * event.start_seconds for event in drawn],
            height=BAR_HEIGHT,
            zorder=order,
            label=action.name,
            color=[_colour(event, stages) for event in drawn],
            **edge,
        )
        if drawn:
            handles.append(Patch(facecolor=COLOURS[action], label=action.value, **edge))
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if max(map(len, stages.values())) > 1:
        handles += [
            Patch(facecolor=_tint("#555555", i), label=f"{('first', 'last')[i]} stage of a rank") for i in (0, 1)
        ]
    columns = min(len(handles), int(figure.get_figwidth() // 1.4))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    # The layout is only known now, and with it the room in a box.
    figure.draw_without_rendering()
    points_per_ms = axes.get_window_extent().width * 72 / figure.dpi / last_ms
    for event in events:
        _write_microbatch(axes, event, row[event.rank], points_per_ms, _colour(event, stages))
    return figure


def _width_inches(events: Sequence[Event]) -> float:
    """Give room for the number in a short box of computing, within what a viewer can show."""
    seconds = sorted(event.stop_seconds - event.start_seconds for event in events if event.action in COMPUTE)
    short = seconds[len(seconds) // 4] if seconds else 0.0
    last = max(event.stop_seconds for event in events)
    num_digits = max(len(str(event.microbatch)) for event in events)
    return min(max(2 + last / short * (0.08 + num_digits * 0.09), 10.0), 24.0) if short > 0 else 10.0


def _label_rows(axes: Axes, busy: dict[int, float], stages: dict[int, list[int]]) -> None:
    names = [
        f"rank {rank}\nstage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}" for rank, own in stages.items()
    ]
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(names)), [f"{share:.0%} busy" for share in busy.values()], fontsize="small")
    right.tick_params(length=0)
    axes.tick_params(axis="y", length=0)
    for side in (*axes.spines.values(), *right.spines.values()):
        side.set_visible(False)
    axes.spines["bottom"].set_visible(True)


def _write_microbatch(
    axes: Axes, event: Event, row: int, points_per_ms: float, colour: tuple[float, float, float]
) -> None:
    """Write the number of the micro batch into a box with room for it."""
    milliseconds, number = 1e3 * (event.stop_seconds - event.start_seconds), str(event.microbatch)
    points = 0.85 * milliseconds * points_per_ms / (DIGIT_WIDTH * len(number))
    if points < SMALLEST_POINTS:
        return
    red, green, blue = colour
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    axes.text(
        1e3 * event.start_seconds + milliseconds / 2,
        row,
        number,
        ha="center",
        va="center_baseline",
        fontsize=min(points, LARGEST_POINTS),
        # Waiting is less visible than computing.
        color="#666666" if event.action is Action.wait else "white" if is_dark else "#222222",
        zorder=10,
    ).set_in_layout(False)


def _edge(action: Action) -> dict[str, Any]:
    if action is Action.wait:
        return {"hatch": "////", "edgecolor": "#C8C8C8", "linewidth": 0.0}
    return {"edgecolor": "white", "linewidth": 0.5} if action in COMPUTE else {"linewidth": 0.0}


def _colour(event: Event, stages: dict[int, list[int]]) -> tuple[float, float, float]:
    own = stages[event.rank]
    share = own.index(event.stage) / (len(own) - 1) if event.action in COMPUTE and len(own) > 1 else 0.0
    return _tint(COLOURS[event.action], share)


def _tint(colour: str, share: float) -> tuple[float, float, float]:
    """Mix a colour with white, by 40 % at most."""
    red, green, blue = (part + (1 - part) * share * 0.4 for part in to_rgb(colour))
    return red, green, blue
