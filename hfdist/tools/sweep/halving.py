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
    """Give the trial that goes on to its next rung; None: none does, yet.

    Args:
        config: `sweep.*`.
        trials: all trials so far.
        running: numbers of the trials that run.
    """
    sign = config.direction.sign
    for bracket in range(config.brackets):
        alike = [trial for trial in trials if bracket_of(config, trial.number) == bracket]
        for rung in reversed(range(config.rungs - bracket - 1)):
            reached = [
                (sign * value, trial)
                for trial in alike
                if len(trial.results) > rung and (value := trial.results[rung].value) is not None
            ]
            reached.sort(key=lambda pair: (pair[0], pair[1].number))
            for _, trial in reached[: len(reached) // config.factor]:
                if len(trial.results) == rung + 1 and trial.failure is None and trial.number not in running:
                    return trial
    return None


def bracket_of(config: SweepConfig, number: int) -> int:
    """Give the bracket of a trial: the rung at which it begins. Brackets have about equally many tokens."""
    most = config.rungs - 1
    sizes = [
        math.ceil((most + 1) / (most - bracket + 1) * config.factor ** (most - bracket))
        for bracket in range(config.brackets)
    ]
    place = number % sum(sizes)
    return next(bracket for bracket, end in enumerate(itertools.accumulate(sizes)) if place < end)


def rungs_of(config: SweepConfig, number: int) -> int:
    """Give the number of rungs that a trial may reach."""
    return config.rungs - bracket_of(config, number)


def tokens_of_rungs(config: SweepConfig, number: int, tokens: int) -> list[int]:
    """Give the number of tokens at the end of each rung of a trial; the last is all `tokens`."""
    first = bracket_of(config, number)
    return [round(tokens / config.factor ** (config.rungs - 1 - rung)) for rung in range(first, config.rungs)]
