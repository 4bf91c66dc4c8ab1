"""The curves of a report: of one run, or of several laid over each other, one colour each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hfdist.tools.report.drawing.chart import COLOURS, Chart, Curve, Mark, colour, draw
from hfdist.tools.report.event_marks import find_marks
from hfdist.tools.report.figures import learning_curves
from hfdist.tools.report.reading.downsample import Point
from hfdist.tools.report.reading.metric_lines import CURVES, HELD_OUT, LOSS
from hfdist.tools.report.reading.rank_steps import PARTS, STEP, RankSteps
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped_lines
from hfdist.units import energy_unit

_MOST_MARKS = 20
"""Most marks of all runs together, in a chart."""
_SMALL = (  # in the order of CURVES, after the loss
    Chart(title="Learning rate", unit="", curves=(), from_zero=True),
    Chart(title="Gradient norm", unit="before clipping", curves=(), may_be_log=True),
    Chart(title="Throughput", unit="tokens a second, all ranks", curves=(), from_zero=True),
    Chart(title="MFU", unit="share of the devices' peak", curves=(), from_zero=True, form="share"),
    Chart(title="Step time", unit="seconds", curves=(), from_zero=True, form="seconds"),
    Chart(title="Most loaded expert", unit="times an even share", curves=()),
    Chart(title="Energy", unit="", curves=(), from_zero=True),
    Chart(title="Cost", unit="all starts", curves=(), from_zero=True),
)
_TIMES = ((172_800.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


class _Learned(NamedTuple):
    """The measure by which runs learn, in the order of the runs; a run with another measure has no points."""

    name: str
    unit: str
    training: Sequence[list[Point]]
    held_out: Sequence[list[Point]]


def loss_charts(runs: Sequence[RunFiles]) -> str:
    """Draw loss and held-out loss over tokens, and loss over time; for reinforcement learning, the reward."""
    losses = _Learned(
        "loss",
        " or ".join(dict.fromkeys(run.task.traits.loss_unit for run in runs if not run.task.traits.is_reinforcement)),
        [[] if run.task.traits.is_reinforcement else run.metrics.curve(LOSS) for run in runs],
        [[] if run.task.traits.is_reinforcement else run.metrics.held_out.get(HELD_OUT, []) for run in runs],
    )
    rewards = _Learned(
        "reward",
        "mean of answers",
        [run.metrics.figures.get("reward", []) for run in runs],
        [run.metrics.held_out_figures.get("reward", []) for run in runs],
    )
    return _learning_charts(runs, losses) + _learning_charts(runs, rewards)


def _learning_charts(runs: Sequence[RunFiles], learned: _Learned) -> str:
    tokens = [run.metrics.tokens for run in runs]
    by_tokens, held_out = _over(runs, tokens, learned.training), _over(runs, tokens, learned.held_out)
    name, is_loss = learned.name, learned.name == LOSS
    base = Chart(title=name.capitalize(), unit=learned.unit, curves=(), x="tokens", may_be_log=is_loss, height=240)
    marked = replace(base, marks=_marks(runs, tokens))
    if len(runs) == 1:
        charts = [replace(marked, curves=learning_curves(runs, by_tokens, held_out))]
    else:
        dotted = [replace(curve, is_dotted=True) for curve in _named(runs, held_out, "")]
        charts = [
            replace(marked, title=f"Training {name}", curves=_named(runs, by_tokens, "")),
            replace(base, title=f"Held-out {name}", curves=dotted),
        ]
    unit, word = _time_unit(max((run.metrics.seconds[-1] for run in runs if run.metrics.seconds), default=0.0))
    axes = [[seconds / unit for seconds in run.metrics.seconds] for run in runs]
    on_time = f"{word} of training, without loading, evaluations and saves"
    curves, title = _named(runs, _over(runs, axes, learned.training), "training"), f"{name.capitalize()} by time"
    charts.append(replace(base, title=title, x=on_time, curves=curves, marks=_marks(runs, axes)))
    return "".join(map(draw, charts))


def _over(runs: Sequence[RunFiles], axes: Sequence[list[float]], curves: Sequence[list[Point]]) -> list[list[Point]]:
    """Give a curve by step of each run over its tokens or seconds."""
    return [run.metrics.over(axis, points) for run, axis, points in zip(runs, axes, curves, strict=True)]


def small_charts(runs: Sequence[RunFiles]) -> str:
    """Draw all other figures of training lines by step that some run has."""
    drawn, marks = [], _marks(runs, [run.metrics.steps for run in runs])
    for key, base in zip(CURVES[1:], _SMALL, strict=True):
        points, unit = [run.metrics.curve(key) for run in runs], base.unit
        if key == "energy_kwh":
            points, unit = _in_energy_unit(points)
        drawn.append(draw(replace(base, unit=unit, curves=_named(runs, points, base.title), marks=marks)))
    return "".join(drawn) + (own_charts(runs[0]) if len(runs) == 1 else "")


def own_charts(run: RunFiles) -> str:
    """Draw the charts of one run that cannot be laid over those of another."""
    return _other_held_out(run) + _step_split(run.ranks) + _memory(run.ranks)


def _named(runs: Sequence[RunFiles], points: Sequence[list[Point]], alone: str) -> list[Curve]:
    """Give the curves that have points; `alone`: the name of the curve of a run that is alone."""
    return [
        Curve(run.name if len(runs) > 1 else alone, own, colour(number))
        for number, (run, own) in enumerate(zip(runs, points, strict=True))
        if any(y is not None for _, y in own)
    ]


def _in_energy_unit(curves: list[list[Point]]) -> tuple[list[list[Point]], str]:
    """Convert curves of kWh to the unit of the report's head, and give that unit in words."""
    known = [y for points in curves for _, y in points if y is not None]
    scale, unit = energy_unit(max(known, default=0.0))
    return [[(x, None if y is None else scale * y) for x, y in points] for points in curves], f"{unit}, all starts"


def _marks(runs: Sequence[RunFiles], axes: Sequence[list[float]]) -> list[Mark]:
    return [
        Mark(
            run.metrics.at_step(axis, mark.step),
            mark.letters,
            f"mark-{number}-{place}",
            mark.is_bad,
            colour(number) if len(runs) > 1 else "",
        )
        for number, (run, axis) in enumerate(zip(runs, axes, strict=True))
        for place, mark in enumerate(find_marks(run, max(_MOST_MARKS // len(runs), 1)))
    ]


def texts_of_marks(runs: Sequence[RunFiles]) -> str:
    """Give the texts of the marks of all charts, each once."""
    return "".join(
        f'<p id="mark-{number}-{place}" hidden>{escaped_lines(f"{run.name}, " * (len(runs) > 1) + mark.text, 2000)}</p>'
        for number, run in enumerate(runs)
        for place, mark in enumerate(find_marks(run, max(_MOST_MARKS // len(runs), 1)))
    )


def _time_unit(seconds: float) -> tuple[float, str]:
    return next((unit, word) for least, unit, word in _TIMES if seconds >= least)


def _other_held_out(run: RunFiles) -> str:
    keys = [key for key in run.metrics.held_out if key != HELD_OUT][:COLOURS]
    curves = [
        Curve(
            key.removeprefix("eval_").removesuffix("_loss"), run.metrics.held_out[key], colour(number), is_dotted=True
        )
        for number, key in enumerate(keys)
    ]
    return draw(Chart(title="Held-out loss by source", unit=run.task.traits.loss_unit, curves=curves)) if curves else ""


def _step_split(ranks: RankSteps) -> str:
    """Draw the parts of a step's time, as means of all ranks, one on top of the other."""
    compute, data, wait = ([(x, y or 0.0) for x, y in _means_of_ranks(ranks, name)] for name in PARTS)
    labels = ["compute", "wait for data", "wait for others"]
    if not any(y for _, y in (*compute, *wait)):
        # On a GPU, only the loader's time and the whole step are measured.
        steps = _means_of_ranks(ranks, STEP)
        compute = [(x, max((y or 0.0) - own, 0.0)) for (x, y), (_, own) in zip(steps, data, strict=True)]
        labels[0] = "compute, or wait for others"
    curves, total = [], dict.fromkeys((x for x, _ in compute), 0.0)
    for number, (label, points) in enumerate(zip(labels, (compute, data, wait), strict=True)):
        if any(y for _, y in points):
            total = {x: total[x] + y for x, y in points}
            curves.append(Curve(label, list(total.items()), f"c{number}"))
    if not curves:
        return ""
    title, unit = "Step time by part", "seconds, mean of ranks"
    return draw(Chart(title=title, unit=unit, curves=curves[::-1], form="seconds", from_zero=True, is_stacked=True))


def _means_of_ranks(ranks: RankSteps, name: str) -> Iterator[Point]:
    for stretch in ranks.stretches:
        known = [value for value in stretch.means(name) if value is not None]
        yield stretch.last_step, sum(known) / len(known) if known else None


def _memory(ranks: RankSteps) -> str:
    """Draw the peak memory of the rank with the most and of the one with the least."""
    peaks = [(s.last_step, [peak / 2**30 for peak in s.peak_bytes if peak > 0]) for s in ranks.stretches]
    most = [(step, max(own)) for step, own in peaks if own]
    least = [(step, min(own)) for step, own in peaks if own]
    if not most:
        return ""
    curves = [Curve("rank with the most", most), Curve("rank with the least", least, "c1")]
    return draw(Chart(title="Peak memory", unit="GiB", curves=curves[: 1 if most == least else 2], from_zero=True))
