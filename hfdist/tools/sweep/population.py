"""Population based training (Jaderberg et al. 2017): members train, and bad ones go on as changed good ones.

    generation 0   0  1  2  3       each for a share of the tokens
    generation 1   4  5  6  7       7 is member 3 again: the worst, so it goes on from the checkpoint of the best

A member of a generation is a trial of its own, which begins at the checkpoint of its parent. Parents and values are
functions of the seed and of the results of trials.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hfdist.config.sweep import SweepConfig
from hfdist.records.trials import Trial
from hfdist.tools.sweep.sampling import choose_values
from hfdist.tools.sweep.space import Dimension, Space

_SHARE = 4
"""One of this many members is replaced after a generation, and as many are copied."""
_FACTORS = (0.8, 1.25)


def generation_of(config: SweepConfig, number: int) -> int:
    """Give the generation of a trial."""
    return number // config.trials


def next_member(
    config: SweepConfig, space: Space, trials: Sequence[Trial]
) -> tuple[dict[str, object], int | None] | None:
    """Give the values and the parent of the trial after these; None: the generation before has not ended.

    The parent is None in the first generation, and where all members have failed.
    """
    generation, member = divmod(len(trials), config.trials)
    if generation == 0:
        return choose_values(config, space, trials), None
    before = trials[(generation - 1) * config.trials : generation * config.trials]
    if any(trial.failure is None and not trial.results for trial in before):
        return None
    sign = config.direction.sign
    # A failed member is worse than all others.
    values = {trial.number: float("inf") if trial.value is None else sign * trial.value for trial in before}
    ranked = sorted(before, key=lambda trial: (values[trial.number], trial.number))
    number = max(1, config.trials // _SHARE)
    own = before[member]
    choose = random.Random(f"{config.seed} {len(trials)}")
    if own.value is not None and (own not in ranked[-number:] or config.trials == 1):
        return own.values, own.number
    good = [trial for trial in ranked[:number] if trial.value is not None]
    parent = choose.choice(good or [own])
    changed: dict[str, object] = {one.key: _explore(one, parent.values[one.key], choose) for one in space.dimensions}
    return changed, parent.number if good else None


def _explore(one: Dimension, value: float, choose: random.Random) -> float:
    changed = float(f"{value * choose.choice(_FACTORS):.6g}")
    return min(max(changed, one.low), one.high)
