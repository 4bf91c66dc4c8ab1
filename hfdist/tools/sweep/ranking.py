"""The best trial of a sweep, the line of its parents, and the table of all trials."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.config.override_text import as_overrides
from hfdist.config.sweep import Sampler
from hfdist.records.trials import Trial, rank_trials
from hfdist.tools.sweep.population import generation_of
from hfdist.tools.sweep.sweep import Sweep


def find_best(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """Give the best of the trials that have come furthest; None: none has a value."""
    valued = [trial for trial in trials if trial.value is not None]
    if valued and sweep.config.sampler is Sampler.pbt:
        newest = generation_of(sweep.config, valued[-1].number)
        valued = [trial for trial in valued if generation_of(sweep.config, trial.number) == newest]
    return next(iter(_ranked(sweep, valued)), None)


def with_parents(trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """Give a trial and its parents, the earliest first: its steps had their values, in this order."""
    line = [trial]
    while (parent := line[0].parent) is not None:
        line.insert(0, trials[parent])
    return line


def format_table(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """Give the table of all trials, the best first."""
    # Without rungs each trial has one.
    rungs = ["rung"] if sweep.has_lengths else []
    rows: list[list[str]] = [["trial", sweep.config.metric, "tokens", *rungs, "values"]]
    for trial in _ranked(sweep, trials):
        shown = "failed" if trial.failure is not None else "-"
        value = shown if trial.value is None else f"{trial.value:.4f}"
        values = " ".join(as_overrides(trial.values))
        reached = [str(len(trial.results)) for _ in rungs]
        rows.append([str(trial.number), value, f"{trial.tokens:,}", *reached, values])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _ranked(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    return rank_trials(trials, sign=sweep.config.direction.sign, has_lengths=sweep.has_lengths)
