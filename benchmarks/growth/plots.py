"""The picture of growth with ranks: what was measured as lines with marks, what it should be as dashes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.growth import runs, theory, training

# Colours that stay apart for the three kinds of colour blindness; marks differ besides.
STYLES = {
    "ddp": ("#332288", "o"),
    "zero1": ("#88CCEE", "s"),
    "zero2": ("#117733", "^"),
    "zero3": ("#DDAA33", "D"),
    "zero3, nothing kept": ("#882255", "v"),
    "pipeline": ("#EE7733", "P"),
    "pipeline x zero1": ("#777777", "X"),
}
_DASHES: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 1.0, "alpha": 0.9}


def draw_ranks(costs: runs.ByRanks, path: Path) -> None:
    """CPU time, memory, messages and checkpoints by the number of ranks."""
    figure = Figure(figsize=(11, 8.2), layout="constrained")
    sent, state, cpu, save = figure.subplots(2, 2).flat
    (alone,) = next(iter(costs.values()))[1]
    parameters, small = alone.num_parameters, alone.num_small_parameters
    whole = 4 * parameters
    for place, (name, by_ranks) in enumerate(costs.items()):
        # One inside the other, where several are equal.
        mark: dict[str, Any] = {"linestyle": "none", "markersize": 16 - 1.6 * place, "markerfacecolor": "none"}
        ranks = [num_ranks for num_ranks in by_ranks if num_ranks > 1]
        colour, _ = STYLES[name]
        expected = [theory.sent_bytes(name, n, parameters, activation_bytes()) / whole for n in ranks]
        sent.plot(ranks, expected, color=colour, **_DASHES)
        _line(sent, name, {n: mean(by_ranks[n], ring_bytes) / whole for n in ranks}, **mark)
        expected = [theory.state_bytes(name, n, parameters, small) / whole for n in by_ranks]
        state.plot(list(by_ranks), expected, color=colour, **_DASHES)
        _line(state, name, {n: mean(c, state_bytes) / whole for n, c in by_ranks.items()}, **mark)
        _line(cpu, name, {n: 1e3 * mean(c, lambda rank: rank.step_cpu_seconds) for n, c in by_ranks.items()})
        _line(save, name, {n: 1e3 * sum(rank.checkpoint_cpu_seconds for rank in c) for n, c in by_ranks.items()})
    ranks = sorted({n for by_ranks in costs.values() for n in by_ranks})
    cpu.plot(ranks, [1e3 * alone.step_cpu_seconds / n for n in ranks], color="black", label="1 / ranks", **_DASHES)
    _label(sent, "Bytes sent are what the formulas say", "sent by a rank in a step / parameters (bytes)")
    _label(state, "The state that a rank holds, too", "weights, optimizer of a rank / parameters (bytes)")
    _label(cpu, "CPU time falls with the share of the batch, not for ZeRO-3", "CPU milliseconds of a step, per rank")
    _label(
        save,
        "A save: each further rank adds some CPU time",
        "CPU milliseconds of a save, all ranks together",
    )
    sent.set_ylim(bottom=0)
    state.set_ylim(bottom=0)
    save.set_ylim(bottom=0)
    cpu.set_yscale("log", base=2)
    cpu.yaxis.set_major_formatter(FuncFormatter(_plain))
    for axes in (sent, state, cpu, save):
        _log_x(axes, ranks, "ranks, the same global batch")
        axes.set_xlim(0.9 * ranks[0], 1.1 * ranks[-1])
    handles, labels = cpu.get_legend_handles_labels()
    labels = [label if label in STYLES else "dashed: the formula (CPU time: one process / ranks)" for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)


def mean(ranks: Iterable[training.Costs], value: Callable[[training.Costs], float]) -> float:
    """Over the ranks of a run."""
    return statistics.fmean(map(value, ranks))


def ring_bytes(rank: training.Costs) -> float:
    """A step's, of all kinds."""
    return rank.ring_bytes


def state_bytes(rank: training.Costs) -> float:
    """Between steps."""
    return rank.weight_bytes + rank.optimizer_bytes


def activation_bytes() -> int:
    """Hidden states of the whole global batch, between two blocks."""
    return 4 * runs.GLOBAL_BATCH_SIZE * runs.SEQUENCE_TOKENS * runs.SIZES["hidden_size"]


def _line(axes: Axes, name: str, points: Mapping[int, float], **more: Any) -> None:
    colour, mark = STYLES[name]
    style = {
        "color": colour,
        "marker": mark,
        "markersize": 7,
        "markeredgewidth": 1.8,
        "label": name,
        "linewidth": 1.2,
    } | more
    axes.plot(list(points), list(points.values()), **style)


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium", fontweight="bold")
    axes.set_ylabel(unit, fontsize="small")
    axes.grid(alpha=0.3)


def _log_x(axes: Axes, values: list[int], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(unit, fontsize="small")


def _plain(value: float, place: int) -> str:
    return f"{value:g}"
