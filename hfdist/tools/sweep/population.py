"""Population based training (Jaderberg et al. 2017): members train, and bad ones go on as changed good ones.

    generation 0   0  1  2  3       each for a share of the tokens
    generation 1   4  5  6  7       7 is member 3 again: the worst, so it goes on from the checkpoint of the best

A member of a generation is a trial of its own, which begins at the checkpoint of its parent. Parents and values are
functions of the seed and of the results of trials.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from hfdist.config.sweep import SweepConfig
from hfdist.records.trials import Trial
from hfdist.tools.sweep.sampling import choose_values
from hfdist.tools.sweep.space import Dimension, Space

_SHARE = 4
"""After a generation, one of this many members is replaced, and one of this many is copied."""
_FACTORS = (0.8, 1.25)
"""Factors by which the values of a copied member change."""


class Member(NamedTuple):
    """A trial of a population that is to begin."""

    values: dict[str, object]
    parent: int | None
    """Number of the trial at whose checkpoint it begins; None: it begins anew."""


def generation_of(config: SweepConfig, number: int) -> int:
    """Give the generation of a trial, by its number."""
    return number // config.trials


def next_member(config: SweepConfig, space: Space, trials: Sequence[Trial]) -> Member | None:
    """Give the member after these trials; None: the generation before has not ended.

    A member begins anew in the first generation, and where all members of the generation before have failed.
    """
    generation, place = divmod(len(trials), config.trials)
    if generation == 0:
        return Member(choose_values(config, space, trials), None)
    before = trials[(generation - 1) * config.trials : generation * config.trials]
    if any(trial.failure is None and not trial.results for trial in before):
        return None
    ranked = _rank(config, before)
    num_replaced = max(1, config.trials // _SHARE)
    same = before[place]
    # A member alone has nobody to copy.
    is_replaced = same in ranked[-num_replaced:] and config.trials > 1
    if same.value is not None and not is_replaced:
        return Member(same.values, same.number)
    choose = random.Random(f"{config.seed} {len(trials)}")
    good = [trial for trial in ranked[:num_replaced] if trial.value is not None]
    copied = choose.choice(good or [same])
    changed: dict[str, object] = {
        dimension.key: _explore(dimension, copied.values[dimension.key], choose) for dimension in space.dimensions
    }
    return Member(changed, copied.number if good else None)


def _rank(config: SweepConfig, members: Sequence[Trial]) -> list[Trial]:
    """Give the members from the best to the worst; a failed one is worse than all others."""
    values = {
        trial.number: math.inf if trial.value is None else config.direction.sign * trial.value for trial in members
    }
    return sorted(members, key=lambda trial: (values[trial.number], trial.number))


def _explore(dimension: Dimension, value: float, choose: random.Random) -> float:
    """Give a value changed by one of the factors, with 6 digits, within its interval."""
    changed = float(f"{value * choose.choice(_FACTORS):.6g}")
    return min(max(changed, dimension.low), dimension.high)
