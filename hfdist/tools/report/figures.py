"""Charts of the figures of preferences and rewards: training beside held out, several runs over each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hfdist.tools.report.drawing.chart import Chart, Curve, colour, draw
from hfdist.tools.report.reading.downsample import Point
from hfdist.tools.report.reading.metric_lines import LOSS, TASK_FIGURES
from hfdist.tools.report.reading.run_files import RunFiles

_MOST_CHARTS = 20


class FigureStyle(NamedTuple):
    """How a figure is shown; a share lies between 0 and 1."""

    title: str
    unit: str = ""
    is_share: bool = False


_STYLES = {
    "rewards/accuracies": FigureStyle("Accuracy", "pairs in which the chosen answer gained more", True),
    "accuracies": FigureStyle("Accuracy", "pairs in which the chosen answer has the higher score", True),
    "rewards/margins": FigureStyle("Reward margin", "beta times the log-ratio to the reference"),
    "margins": FigureStyle("Margin", "score of the chosen answer, less that of the rejected one"),
    "rewards/chosen": FigureStyle("Reward of chosen answers", "beta times the log-ratio to the reference"),
    "rewards/rejected": FigureStyle("Reward of rejected answers", "beta times the log-ratio to the reference"),
    "reward_std": FigureStyle("Spread of rewards", "standard deviation among a prompt's answers"),
    "kl": FigureStyle("KL", "how far the model is from its reference"),
    "entropy": FigureStyle("Entropy", "nats a token"),
    "clipped_ratios": FigureStyle("Clipped ratios", "share of them", True),
    "completion_tokens": FigureStyle("Length of answers", "tokens, mean"),
    "dead_groups": FigureStyle("Prompts without a difference", "share of them: all answers have one reward", True),
    "mismatch": FigureStyle("Distance from the generators' policy", "mean |log-ratio| of a token, nats"),
    "largest_ratio": FigureStyle("Largest ratio to the generators' policy"),
    "cut_off": FigureStyle("Answers that are cut off", "share of them", True),
}


def task_charts(runs: Sequence[RunFiles]) -> list[str]:
    """Give a chart of each figure by step that some run has; the sum of rewards is in `loss_charts`."""
    keys = list(dict.fromkeys(key for run in runs for key in (*run.metrics.figures, *run.metrics.held_out_figures)))
    known = [key for key in TASK_FIGURES if key in keys and key != "reward"]
    own = [key for key in keys if key not in TASK_FIGURES]
    charts = [_policy_loss(runs), *(_figure_chart(runs, key) for key in (known + own)[:_MOST_CHARTS])]
    return list(filter(None, charts))


def learning_curves(
    runs: Sequence[RunFiles], training: Sequence[list[Point]], held_out: Sequence[list[Point]]
) -> list[Curve]:
    """Give both curves of each run in its colour; a run that is alone has two colours."""
    return [
        curve
        for number, run in enumerate(runs)
        for curve in _curves_of(runs, number, training[number], held_out[number])
    ]


def _curves_of(runs: Sequence[RunFiles], number: int, training: list[Point], held_out: list[Point]) -> Iterator[Curve]:
    is_alone, name = len(runs) == 1, runs[number].name
    if any(y is not None for _, y in training):
        yield Curve("training" if is_alone else name, training, colour(number))
    if any(y is not None for _, y in held_out):
        label, own = ("held out", "c1") if is_alone else (f"{name}, held out", colour(number))
        yield Curve(label, held_out, own, is_dotted=True)


def _figure_chart(runs: Sequence[RunFiles], key: str) -> str:
    style = _STYLES.get(key) or FigureStyle(f"Reward {key.partition('/')[2]}", "mean of answers")
    curves = learning_curves(
        runs,
        [run.metrics.figures.get(key, []) for run in runs],
        [run.metrics.held_out_figures.get(key, []) for run in runs],
    )
    chart = Chart(title=style.title, unit=style.unit, curves=curves)
    return draw(replace(chart, form="share", from_zero=True) if style.is_share else chart)


def _policy_loss(runs: Sequence[RunFiles]) -> str:
    """Draw the policy's loss, which is near 0 whatever the model can do, and no measure of it."""
    points = [run.metrics.curve(LOSS) if run.task.traits.is_reinforcement else [] for run in runs]
    units = {run.task.traits.loss_unit for run in runs if run.task.traits.is_reinforcement}
    unit = units.pop() if len(units) == 1 else ""
    return draw(Chart(title="Policy loss", unit=unit, curves=learning_curves(runs, points, [[] for _ in runs])))
