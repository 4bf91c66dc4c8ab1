"""Draw a measured schedule: ranks by time, one box for each forward and backward of a micro batch."""

from __future__ import annotations

from collections.abc import Iterable
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
    Action.optimizer: "#66CCEE",
}
HATCH = "#C8C8C8"
BAR_HEIGHT = 0.84
LARGEST_POINTS, SMALLEST_POINTS = 9.0, 4.5
DIGIT_WIDTH = 0.64
"""Width of a digit, as a share of the size of the font."""


def draw(events: Iterable[Event], path: Path, *, title: str, formula: float | None) -> Path:
    """Draw events as `build_figure` does, into a PNG or an SVG by the suffix of `path`, and give `path`."""
    build_figure(events, title=title, formula=formula).savefig(path, dpi=150)
    return path


def build_figure(events: Iterable[Event], *, title: str, formula: float | None) -> Figure:
    """Lay out ranks by time: a bar for each event, its micro batch in it, a lighter shade for later stages of a rank.

    Args:
        events: of all ranks; at least one.
        title: what ran, e.g. the schedule and its numbers of stages and micro batches.
        formula: the bubble that the schedule would have with stages of one speed, as a fraction; None: none is known.
    """
    events = sorted(events, key=lambda event: event.start_seconds)
    busy = busy_by_rank(events)
    compute = [event for event in events if event.action in COMPUTE]
    stages = {rank: sorted({event.stage for event in compute if event.rank == rank}) for rank in busy}
    # A Figure of its own, without pyplot, needs no display and leaves no state behind.
    figure = Figure(figsize=_size_inches(events, num_ranks=len(busy)), layout="constrained")
    axes = figure.add_subplot()
    _draw_rows(axes, events, stages)
    _label_rows(axes, busy, stages)
    axes.set_xlabel("milliseconds since the start of the step")
    known = "" if formula is None else f", {formula:.1%} by the formula"
    figure.suptitle(title, fontweight="bold")
    axes.set_title(f"bubble: {1 - fmean(busy.values()):.1%} measured{known}", fontsize="medium")
    handles = _legend_handles(events, most_stages=max(map(len, stages.values())))
    columns = min(len(handles), int(figure.get_figwidth() // 1.4))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    _write_microbatches(figure, axes, events, stages)
    return figure


def _size_inches(events: list[Event], num_ranks: int) -> tuple[float, float]:
    """Give room for the number in a short box of computing, within what a viewer can show."""
    seconds = sorted(event.stop_seconds - event.start_seconds for event in events if event.action in COMPUTE)
    short = seconds[len(seconds) // 4] if seconds else 0.0
    last = max(event.stop_seconds for event in events)
    num_digits = max(len(_number(event)) for event in events)
    wanted = last / short * (0.08 + num_digits * 0.09) if short > 0 else 0.0
    return min(max(2 + wanted, 10.0), 24.0), 1.8 + 0.45 * num_ranks


def _draw_rows(axes: Axes, events: list[Event], stages: dict[int, list[int]]) -> None:
    row = {rank: index for index, rank in enumerate(stages)}
    last_ms = 1e3 * max(event.stop_seconds for event in events)
    axes.barh(list(row.values()), last_ms, height=BAR_HEIGHT, color=IDLE, zorder=0, label="idle")
    for order, action in enumerate(Action, start=1):
        of_action = [event for event in events if event.action is action]
        axes.barh(
            [row[event.rank] for event in of_action],
            [1e3 * (event.stop_seconds - event.start_seconds) for event in of_action],
            left=[1e3 * event.start_seconds for event in of_action],
            height=BAR_HEIGHT,
            zorder=order,
            label=action.name,
            color=[_colour(event, stages) for event in of_action],
            **_edge(action),
        )
    axes.set_xlim(0, last_ms)


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


def _legend_handles(events: list[Event], most_stages: int) -> list[Patch]:
    seen = {event.action for event in events}
    handles = [
        Patch(facecolor=COLOURS[action], label=action.value, **_edge(action)) for action in Action if action in seen
    ]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if most_stages > 1:
        handles += [
            Patch(facecolor=_tint("#555555", i), label=f"{word} stage of a rank")
            for i, word in enumerate(("first", "last"))
        ]
    return handles


def _write_microbatches(figure: Figure, axes: Axes, events: list[Event], stages: dict[int, list[int]]) -> None:
    """Write the number of the micro batch into each box with room for it."""
    row = {rank: index for index, rank in enumerate(stages)}
    figure.draw_without_rendering()
    points_per_second = axes.get_window_extent().width * 72 / figure.dpi / max(event.stop_seconds for event in events)
    for event in events:
        seconds = event.stop_seconds - event.start_seconds
        room = seconds * points_per_second / (DIGIT_WIDTH * max(len(_number(event)), 1))
        if event.microbatch is None or 0.85 * room < SMALLEST_POINTS:
            continue
        axes.text(
            1e3 * (event.start_seconds + seconds / 2),
            row[event.rank],
            _number(event),
            ha="center",
            va="center_baseline",
            fontsize=min(0.85 * room, LARGEST_POINTS),
            color=_text_colour(event, stages),
            zorder=10,
        ).set_in_layout(False)


def _number(event: Event) -> str:
    return "" if event.microbatch is None else str(event.microbatch)


def _edge(action: Action) -> dict[str, Any]:
    if action is Action.wait:
        return {"hatch": "////", "edgecolor": HATCH, "linewidth": 0.0}
    return {"edgecolor": "white", "linewidth": 0.5} if action in COMPUTE else {"linewidth": 0.0}


def _colour(event: Event, stages: dict[int, list[int]]) -> tuple[float, float, float]:
    own = stages[event.rank]
    share = own.index(event.stage) / (len(own) - 1) if event.action in COMPUTE and len(own) > 1 else 0.0
    return _tint(COLOURS[event.action], share)


def _tint(colour: str, share: float) -> tuple[float, float, float]:
    """Mix a colour with white, by 40 % at most."""
    red, green, blue = (part + (1 - part) * share * 0.4 for part in to_rgb(colour))
    return red, green, blue


def _text_colour(event: Event, stages: dict[int, list[int]]) -> str:
    if event.action is Action.wait:
        return "#666666"
    red, green, blue = _colour(event, stages)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#222222"
