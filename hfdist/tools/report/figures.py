"""Charts of what is measured of preferences and rewards: a chart a figure, with training and held-out curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hfdist.tools.report.drawing.chart import Chart, Curve, colour, draw
from hfdist.tools.report.reading.downsample import Point
from hfdist.tools.report.reading.metric_lines import LOSS, TASK_FIGURES
from hfdist.tools.report.reading.run_files import RunFiles

_MOST_CHARTS = 20


class FigureStyle(NamedTuple):
    """How a figure is shown."""

    title: str
    unit: str = ""
    """Unit of the figure, or what is counted, in words."""
    is_share: bool = False
    """Whether the figure lies between 0 and 1, and is shown in percent."""


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
    """Give a chart as HTML of each figure that some run has, over the steps, but for the sum of rewards.

    That sum is what runs of reinforcement learning learn by: it has the large chart in the place of the loss.
    """
    keys: dict[str, None] = {}  # A set that keeps its order.
    for run in runs:
        keys |= dict.fromkeys((*run.metrics.figures, *run.metrics.held_out_figures))
    known = [key for key in TASK_FIGURES if key in keys and key != "reward"]
    # The rewards of a user, each by its name.
    others = [key for key in keys if key not in TASK_FIGURES]
    charts = [_policy_loss(runs), *(_figure_chart(runs, key) for key in (known + others)[:_MOST_CHARTS])]
    return [chart for chart in charts if chart]


def learning_curves(
    runs: Sequence[RunFiles], training: Sequence[list[Point]], held_out: Sequence[list[Point]]
) -> list[Curve]:
    """Give the training curve and the held-out curve of each run; curves without a value are left out.

    Several runs have a colour each, for both curves. One run alone has a colour for each curve.

    Args:
        runs: the runs of the page.
        training: points of each run.
        held_out: points of each run.
    """
    curves = []
    for number, run in enumerate(runs):
        if len(runs) == 1:
            both = (
                Curve("training", training[number], colour(0)),
                Curve("held out", held_out[number], colour(1), is_dotted=True),
            )
        else:
            both = (
                Curve(run.name, training[number], colour(number)),
                Curve(f"{run.name}, held out", held_out[number], colour(number), is_dotted=True),
            )
        curves += [curve for curve in both if any(y is not None for _, y in curve.points)]
    return curves


def _figure_chart(runs: Sequence[RunFiles], key: str) -> str:
    style = _STYLES.get(key) or FigureStyle(f"Reward {key.removeprefix('rewards/')}", "mean of answers")
    curves = learning_curves(
        runs,
        [run.metrics.figures.get(key, []) for run in runs],
        [run.metrics.held_out_figures.get(key, []) for run in runs],
    )
    chart = Chart(title=style.title, unit=style.unit, curves=curves)
    if style.is_share:
        chart = replace(chart, form="share", from_zero=True)
    return draw(chart)


def _policy_loss(runs: Sequence[RunFiles]) -> str:
    """Draw the loss of runs of reinforcement learning: it stays near 0, and does not measure what the model can do."""
    points = [run.metrics.curve(LOSS) if run.task.traits.is_reinforcement else [] for run in runs]
    units = {run.task.traits.loss_unit for run in runs if run.task.traits.is_reinforcement}
    unit = units.pop() if len(units) == 1 else ""
    curves = learning_curves(runs, points, [[] for _ in runs])
    return draw(Chart(title="Policy loss", unit=unit, curves=curves))
