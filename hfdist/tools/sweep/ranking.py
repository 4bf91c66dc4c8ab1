"""The trials of a sweep from the best to the worst: the best one, with its parents, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.config.override_text import as_overrides
from hfdist.config.sweep import Sampler
from hfdist.records.trials import Trial, rank_trials
from hfdist.tools.sweep.population import generation_of
from hfdist.tools.sweep.sweep import Sweep


def find_best(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """Give the best of the trials that have come furthest, in a population those of the newest generation.

    Give None if no trial has a value.
    """
    with_value = [trial for trial in trials if trial.value is not None]
    if with_value and sweep.config.sampler is Sampler.pbt:
        newest = generation_of(sweep.config, with_value[-1].number)
        with_value = [trial for trial in with_value if generation_of(sweep.config, trial.number) == newest]
    return next(iter(_ranked(sweep, with_value)), None)


def with_parents(trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """Give the parents of a trial, the earliest first, and the trial: its steps had their values, in this order."""
    family = [trial]
    while (parent := family[0].parent) is not None:
        family.insert(0, trials[parent])
    return family


def format_table(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """Give the table of all trials as text, the best first; it has rungs if trials train for several lengths."""
    heads = ["trial", sweep.config.metric, "tokens", "rung", "values"]
    rows = [heads, *(_cells(trial) for trial in _ranked(sweep, trials))]
    if not sweep.has_lengths:
        rung = heads.index("rung")
        rows = [row[:rung] + row[rung + 1 :] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, values in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*aligned, values]))
    return "\n".join(lines)


def _cells(trial: Trial) -> list[str]:
    """Give a trial's number, value of the metric, tokens, number of rungs and overrides."""
    without_value = "-" if trial.failure is None else "failed"
    value = without_value if trial.value is None else f"{trial.value:.4f}"
    overrides = " ".join(as_overrides(trial.values))
    return [str(trial.number), value, f"{trial.tokens:,}", str(len(trial.results)), overrides]


def _ranked(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    return rank_trials(trials, sign=sweep.config.direction.sign, has_lengths=sweep.has_lengths)
