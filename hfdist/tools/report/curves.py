"""The charts of training in a report: one run's curves, or several runs' curves laid over each other, a colour each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hfdist.tools.report.drawing.chart import COLOURS, Chart, Curve, Mark, colour, draw
from hfdist.tools.report.event_marks import EventMark, find_marks
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


class _TimeUnit(NamedTuple):
    """A unit of a time axis, for runs of at least so many seconds."""

    name: str
    seconds: float
    least_seconds: float


_TIME_UNITS = (
    _TimeUnit("days", 86_400.0, 172_800.0),
    _TimeUnit("hours", 3600.0, 7200.0),
    _TimeUnit("minutes", 60.0, 120.0),
    _TimeUnit("seconds", 1.0, 0.0),
)


class _Learned(NamedTuple):
    """The measure by which runs learn: a curve over the steps for each run, without points for another measure."""

    name: str
    unit: str
    training: Sequence[list[Point]]
    held_out: Sequence[list[Point]]


def loss_charts(runs: Sequence[RunFiles]) -> str:
    """Draw loss and held-out loss over tokens, and loss over time; the same of rewards, for reinforcement learning."""
    traits = [run.task.traits for run in runs]
    losses = _Learned(
        name="loss",
        unit=" or ".join(dict.fromkeys(one.loss_unit for one in traits if not one.is_reinforcement)),
        training=[
            [] if one.is_reinforcement else run.metrics.curve(LOSS) for run, one in zip(runs, traits, strict=True)
        ],
        held_out=[
            [] if one.is_reinforcement else run.metrics.held_out.get(HELD_OUT, [])
            for run, one in zip(runs, traits, strict=True)
        ],
    )
    rewards = _Learned(
        name="reward",
        unit="mean of answers",
        training=[run.metrics.figures.get("reward", []) for run in runs],
        held_out=[run.metrics.held_out_figures.get("reward", []) for run in runs],
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
        dotted = [replace(curve, is_dotted=True) for curve in _curves(runs, held_out)]
        charts = [
            replace(marked, title=f"Training {name}", curves=_curves(runs, by_tokens)),
            replace(base, title=f"Held-out {name}", curves=dotted),
        ]
    charts.append(_by_time(runs, learned, base))
    return "".join(map(draw, charts))


def _by_time(runs: Sequence[RunFiles], learned: _Learned, base: Chart) -> Chart:
    """Give the chart of the training's measure over the time of training."""
    longest = max((run.metrics.seconds[-1] for run in runs if run.metrics.seconds), default=0.0)
    unit = next(unit for unit in _TIME_UNITS if longest >= unit.least_seconds)
    axes = [[seconds / unit.seconds for seconds in run.metrics.seconds] for run in runs]
    return replace(
        base,
        title=f"{learned.name.capitalize()} by time",
        x=f"{unit.name} of training, without loading, evaluations and saves",
        curves=_curves(runs, _over(runs, axes, learned.training), name_of_one_run="training"),
        marks=_marks(runs, axes),
    )


def _over(runs: Sequence[RunFiles], axes: Sequence[list[float]], curves: Sequence[list[Point]]) -> list[list[Point]]:
    """Give each run's curve over its tokens or seconds, from the curve over its steps."""
    return [run.metrics.points_over(axis, points) for run, axis, points in zip(runs, axes, curves, strict=True)]


def small_charts(runs: Sequence[RunFiles]) -> str:
    """Draw all other figures of training lines over the steps; a figure that no run has is left out."""
    drawn, marks = [], _marks(runs, [run.metrics.steps for run in runs])
    for key, base in zip(CURVES[1:], _SMALL, strict=True):
        points, unit = [run.metrics.curve(key) for run in runs], base.unit
        if key == "energy_kwh":
            points, unit = _in_energy_unit(points)
        curves = _curves(runs, points, name_of_one_run=base.title)
        drawn.append(draw(replace(base, unit=unit, curves=curves, marks=marks)))
    if len(runs) == 1:
        drawn.append(own_charts(runs[0]))
    return "".join(drawn)


def own_charts(run: RunFiles) -> str:
    """Draw the charts of one run that cannot be laid over the charts of another."""
    return _other_held_out(run) + _step_split(run.ranks) + _memory(run.ranks)


def _curves(runs: Sequence[RunFiles], points: Sequence[list[Point]], name_of_one_run: str = "") -> list[Curve]:
    """Give a curve for each run that has points, with the run's name and colour.

    Args:
        runs: the runs of the page.
        points: the points of each run.
        name_of_one_run: the curve's name if the page has one run only.
    """
    return [
        Curve(run.name if len(runs) > 1 else name_of_one_run, of_run, colour(number))
        for number, (run, of_run) in enumerate(zip(runs, points, strict=True))
        if any(y is not None for _, y in of_run)
    ]


def _in_energy_unit(curves: list[list[Point]]) -> tuple[list[list[Point]], str]:
    """Give curves of kWh in the unit that suits their highest value, and that unit in words."""
    known = [y for points in curves for _, y in points if y is not None]
    scale, unit = energy_unit(max(known, default=0.0))
    return [[(x, None if y is None else scale * y) for x, y in points] for points in curves], f"{unit}, all starts"


def _find_marks(runs: Sequence[RunFiles]) -> Iterator[tuple[int, str, EventMark]]:
    """Give each mark with the number of its run and the id of the page's element that has its text."""
    for number, run in enumerate(runs):
        for place, mark in enumerate(find_marks(run, max(_MOST_MARKS // len(runs), 1))):
            yield number, f"mark-{number}-{place}", mark


def _marks(runs: Sequence[RunFiles], axes: Sequence[list[float]]) -> list[Mark]:
    """Give the marks of a chart; `axes` has the x of each training line, for each run."""
    return [
        Mark(
            x=runs[number].metrics.at_step(axes[number], mark.step),
            letter=mark.letters,
            text_id=text_id,
            is_bad=mark.is_bad,
            colour=colour(number) if len(runs) > 1 else "",
        )
        for number, text_id, mark in _find_marks(runs)
    ]


def texts_of_marks(runs: Sequence[RunFiles]) -> str:
    """Give the texts of the marks as hidden HTML; all charts share them."""
    drawn = []
    for number, text_id, mark in _find_marks(runs):
        text = f"{runs[number].name}, {mark.text}" if len(runs) > 1 else mark.text
        drawn.append(f'<p id="{text_id}" hidden>{escaped_lines(text, 2000)}</p>')
    return "".join(drawn)


def _other_held_out(run: RunFiles) -> str:
    """Draw the held-out losses of single sources, whose keys are `eval_SOURCE_loss`."""
    keys = [key for key in run.metrics.held_out if key != HELD_OUT][:COLOURS]
    curves = []
    for number, key in enumerate(keys):
        source = key.removeprefix("eval_").removesuffix("_loss")
        curves.append(Curve(source, run.metrics.held_out[key], colour(number), is_dotted=True))
    return draw(Chart(title="Held-out loss by source", unit=run.task.traits.loss_unit, curves=curves))


def _step_split(ranks: RankSteps) -> str:
    """Draw the parts of a step's time, as means of all ranks, one on top of the other."""
    compute, data, wait = ([(x, y or 0.0) for x, y in _means_of_ranks(ranks, name)] for name in PARTS)
    compute_label = "compute"
    if not any(y for _, y in (*compute, *wait)):
        # On a GPU, only the loader's time and the whole step are measured.
        steps = _means_of_ranks(ranks, STEP)
        compute = [(x, max((y or 0.0) - waited, 0.0)) for (x, y), (_, waited) in zip(steps, data, strict=True)]
        compute_label = "compute, or wait for others"
    parts = {compute_label: compute, "wait for data": data, "wait for others": wait}
    curves, top_by_x = [], dict.fromkeys((x for x, _ in compute), 0.0)
    for number, (label, points) in enumerate(parts.items()):
        if any(y for _, y in points):
            top_by_x = {x: top_by_x[x] + y for x, y in points}
            curves.append(Curve(label, list(top_by_x.items()), f"c{number}"))
    # The highest curve is drawn first, so that the areas of the lower ones lie over it.
    curves.reverse()
    title, unit = "Step time by part", "seconds, mean of ranks"
    return draw(Chart(title=title, unit=unit, curves=curves, form="seconds", from_zero=True, is_stacked=True))


def _means_of_ranks(ranks: RankSteps, name: str) -> Iterator[Point]:
    """Give the mean of all ranks over the steps, in seconds, for the step or one of its parts."""
    for stretch in ranks.stretches:
        known = [value for value in stretch.means(name) if value is not None]
        yield stretch.last_step, sum(known) / len(known) if known else None


def _memory(ranks: RankSteps) -> str:
    """Draw the peak memory of the rank with the most and of the rank with the least."""
    most: list[Point] = []
    least: list[Point] = []
    for stretch in ranks.stretches:
        known = [peak / 2**30 for peak in stretch.peak_bytes if peak > 0]
        if known:
            most.append((stretch.last_step, max(known)))
            least.append((stretch.last_step, min(known)))
    curves = [Curve("rank with the most", most)]
    if least != most:
        curves.append(Curve("rank with the least", least, "c1"))
    return draw(Chart(title="Peak memory", unit="GiB", curves=curves, from_zero=True))
