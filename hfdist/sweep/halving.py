"""Which trial runs next, and how far: asynchronous successive halving (ASHA, Li et al. 2020).

    rung 0   0 1 2 3 4 5 6 7 8      all trials, a ninth of the tokens each
    rung 1     1     4     7        of those that have come so far, the best third goes on from its checkpoint
    rung 2           4              and once more

With one rung all trials train to their end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hfdist.config.sweep import Direction, SweepConfig
from hfdist.sweep.book import Trial


def next_promotion(config: SweepConfig, trials: Sequence[Trial], running: Collection[int]) -> Trial | None:
    """Give the trial that goes on to its next rung; None: none does, yet.

    Args:
        config: `sweep.*`.
        trials: all so far.
        running: numbers of those that run.
    """
    sign = 1 if config.direction is Direction.minimize else -1
    for rung in reversed(range(config.rungs - 1)):
        reached = [
            (sign * value, trial)
            for trial in trials
            if len(trial.results) > rung and (value := trial.results[rung].value) is not None
        ]
        reached.sort(key=lambda pair: (pair[0], pair[1].number))
        for _, trial in reached[: len(reached) // config.factor]:
            if len(trial.results) == rung + 1 and trial.failure is None and trial.number not in running:
                return trial
    return None


def tokens_of_rungs(config: SweepConfig, tokens: int) -> list[int]:
    """Give the tokens at whose end each rung is, of which the last is all."""
    return [round(tokens / config.factor ** (config.rungs - 1 - rung)) for rung in range(config.rungs)]
