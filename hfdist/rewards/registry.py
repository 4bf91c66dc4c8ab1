"""Rewards by name: built in, or an entry point of an installed package. Their scores are checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hfdist.config.task import REWARD_MODEL
from hfdist.errors import ConfigError, DataError, HfdistError, named_line
from hfdist.plugins import load_plugin
from hfdist.rewards.arithmetic import arithmetic
from hfdist.rewards.code import SANDBOXED
from hfdist.rewards.generation import Generation
from hfdist.rewards.overlong import overlong

GROUP = "hfdist.rewards"
"""Group of entry points, in a package's pyproject.toml: `[project.entry-points."hfdist.rewards"]`."""

Steps = Sequence[tuple[int, float]]
"""Scores of the steps of a completion, in their order: the number of its characters up to the end of a step, and that
step's score."""
Score = Callable[[Sequence[Generation]], Sequence[float | Steps]]
"""A function that gives one finite number for each generation, in their order, or the scores of its steps."""

BUILT_IN: Mapping[str, Score] = MappingProxyType({"arithmetic": arithmetic, "overlong": overlong, **SANDBOXED})


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A function that scores completions, with its share of a sum of rewards."""

    name: str
    weight: float
    score: Score

    def __call__(self, generations: Sequence[Generation]) -> list[float | Steps]:
        """Give one finite float for each generation, or its steps; they are not multiplied by the weight.

        Raises:
            DataError: the function raises, or gives something else.
        """
        where, allowed = f"reward {self.name}", f"one finite number for each generation: {len(generations)}"
        try:
            scores = self.score(generations)
            values = _listed(scores)
        except HfdistError:
            raise
        except Exception as error:  # whatever a package raises
            raise DataError(f"the reward fails: {named_line(error)}", where=where) from error
        if values is None:
            found = type(scores).__name__
            raise DataError("the reward gives no list", where=where, found=found, allowed=allowed)
        if len(values) != len(generations):
            what = "the reward gives another number of scores"
            raise DataError(what, where=where, found=len(values), allowed=allowed)
        checked: list[float | Steps] = []
        for place, (value, one) in enumerate(zip(values, generations, strict=True)):
            score = float(value) if _is_finite(value) else read_steps(value, len(one.text))
            if score is None:
                what = f"score {place} of the reward is no finite number, and no list of steps"
                allowed += f", or [(end, score), ...] with rising ends from 1 to {len(one.text):,}, its characters"
                raise DataError(what, where=where, found=f"{value!r:.200}", allowed=allowed)
            checked.append(score)
        return checked


def _listed(scores: Any) -> list[Any] | None:
    """Give scores as a list, which runs a generator function; None: they cannot be listed."""
    try:
        given = iter(scores)
    except TypeError:
        return None
    return list(given)


def read_steps(value: object, num_characters: int) -> Steps | None:
    """Give what a reward says of the steps of a completion as plain values; None: that is something else.

    Args:
        value: as the reward gives it.
        num_characters: the length of the completion, beyond which no step ends.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > num_characters:
        return None
    steps: list[tuple[int, float]] = []
    before = 0
    for step in value:
        if not isinstance(step, Sequence) or len(step) != 2 or not isinstance(step[0], int) or not _is_finite(step[1]):
            return None
        if not before < step[0] <= num_characters:
            return None
        before = step[0]
        steps.append((step[0], float(step[1])))
    return steps


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        return False


def load_rewards(
    names: Mapping[str, float], *, where: str = "rewards", others: Mapping[str, Score] = MappingProxyType({})
) -> list[Reward]:
    """Find rewards by name, and import the packages that offer them.

    Args:
        names: the weight of each reward.
        where: the config key that holds `names`.
        others: further rewards of the caller, by name.

    Raises:
        ConfigError: a weight is no finite number, or no installed package offers a reward of this name.
    """
    if not isinstance(names, Mapping):
        what, allowed, hint = "rewards are given with their weights", "{NAME: WEIGHT}", f"{{{_name_in(names)!r}: 1.0}}"
        raise ConfigError(what, where=where, found=f"{names!r:.80}", allowed=allowed, hint=hint)
    for name, weight in names.items():
        if isinstance(weight, str):
            number = weight if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", weight) else 1.0
            what, hint = "the weight of a reward is text", f"{{{name!r}: {number}}}"
            raise ConfigError(what, where=f"{where}.{name}", found=repr(weight), allowed="a number", hint=hint)
        if not _is_finite(weight):
            what = "the weight of a reward is no finite number"
            raise ConfigError(what, where=f"{where}.{name}", found=weight, hint=f"{where}.{name}=1.0")
    known = {**BUILT_IN, **others}
    return [
        Reward(name=name, weight=float(weight), score=known[name] if name in known else _load(name, where))
        for name, weight in names.items()
    ]


def _name_in(given: object) -> str:
    """Give a reward's name for a hint, from a name, a list of names or a function in place of a mapping."""
    one = next(iter(given), "NAME") if isinstance(given, list | tuple | set) else given
    return one if isinstance(one, str) else getattr(one, "__name__", "NAME").strip("<>")


def _load(name: str, where: str) -> Score:
    expected = "a function of a list of hfdist.Generation that gives a number, or scores of steps, for each"
    hint, known = f"'{where}={{{{}}: 1.0}}'", (*BUILT_IN, REWARD_MODEL)
    score: Score = load_plugin(GROUP, name, kind="reward", expected=expected, where=where, hint=hint, built_in=known)
    return score
