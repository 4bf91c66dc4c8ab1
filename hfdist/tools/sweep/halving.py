"""Which trial runs next, and how far: asynchronous successive halving (ASHA, Li et al. 2020).

    rung 0   0 1 2 3 4 5 6 7 8      all trials, a ninth of the tokens each
    rung 1     1     4     7        the best third of those that ended rung 0 goes on from its checkpoint
    rung 2           4              and the best third of those that ended rung 1

With one rung all trials train to their end. With brackets (Hyperband, Li et al. 2018) the trials of bracket 1 begin at
rung 1, and are compared with each other alone; and so on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from hfdist.config.sweep import SweepConfig
from hfdist.records.trials import Trial


def next_promotion(config: SweepConfig, trials: Sequence[Trial], running: Collection[int]) -> Trial | None:
    """Give the trial that goes on to its next rung; None: no trial does, yet.

    Args:
        config: `sweep.*`.
        trials: all trials so far.
        running: numbers of the trials that run.
    """
    for bracket in range(config.brackets):
        in_bracket = [trial for trial in trials if bracket_of(config, trial.number) == bracket]
        # The highest rung first: a trial that has come far is worth more than a new one.
        for rung in reversed(range(config.rungs - bracket - 1)):
            for trial in _best_share(config, in_bracket, rung):
                has_ended_rung_last = len(trial.results) == rung + 1
                if has_ended_rung_last and trial.failure is None and trial.number not in running:
                    return trial
    return None


def _best_share(config: SweepConfig, trials: Sequence[Trial], rung: int) -> list[Trial]:
    """Give the trials that were the best at the end of a rung, one of `factor` of those that ended it."""
    values = {
        trial.number: config.direction.sign * value
        for trial in trials
        if len(trial.results) > rung and (value := trial.results[rung].value) is not None
    }
    ended = [trial for trial in trials if trial.number in values]
    ended.sort(key=lambda trial: (values[trial.number], trial.number))
    return ended[: len(ended) // config.factor]


def bracket_of(config: SweepConfig, number: int) -> int:
    """Give the bracket of a trial by its number: the rung at which the trial begins.

    Of each round of trials, so many are in bracket b that brackets have about equally many tokens:
    ceil((s + 1) / (s - b + 1) * factor^(s - b)), with the last rung s.
    """
    last_rung = config.rungs - 1
    sizes = [
        math.ceil((last_rung + 1) / (last_rung - bracket + 1) * config.factor ** (last_rung - bracket))
        for bracket in range(config.brackets)
    ]
    place_in_round = number % sum(sizes)
    ends = itertools.accumulate(sizes)
    return next(bracket for bracket, end in enumerate(ends) if place_in_round < end)


def rungs_of(config: SweepConfig, number: int) -> int:
    """Give the number of rungs that the trial of a number may reach."""
    return config.rungs - bracket_of(config, number)


def tokens_of_rungs(config: SweepConfig, number: int, tokens: int) -> list[int]:
    """Give the number of tokens at the end of each rung of the trial of a number; the last one is all `tokens`."""
    first = bracket_of(config, number)
    return [round(tokens / config.factor ** (config.rungs - 1 - rung)) for rung in range(first, config.rungs)]
