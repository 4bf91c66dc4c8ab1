"""The space of a sweep: which keys vary, and among which values. It is written as Hydra writes sweeps.

    optimizer.lr=tag(log, interval(1e-5, 1e-2))     between two numbers; log: each factor is as likely
    optimizer.warmup_steps=int(interval(0, 100))    whole numbers
    strategy=choice(ddp, zero1)                     one of these; also without the word
    optimizer.weight_decay=interval(0.5, 0.99) if optimizer.name=sgd

Each value is then checked as an override of a run is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from hfdist.config.likely_keys import nearest_key
from hfdist.config.override_text import as_override, as_text, parse_override
from hfdist.config.schema import all_keys, find_key
from hfdist.errors import ConfigError, nearest

_IF = " if "
_NOT_SWEPT = ("run", "launch", "report", "checkpoint")
"""Groups whose keys must not vary: they do not change what is trained."""
_ALLOWED = "choice(a,b), range(1,9,2), interval(0,1), int(interval(1,8)), tag(log, interval(1e-5,1e-2))"


class Condition(NamedTuple):
    """What a trial must have so that it has another key, too."""

    key: str
    value: str
    """Value of that key, as text of a command line."""

    def __repr__(self) -> str:
        # A sweep's settings have dimensions as their `repr`, with plain tuples: earlier folders must compare as equal.
        return repr(tuple(self))


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A key that varies, with its values: one of some choices, or a number of an interval."""

    key: str
    choices: tuple[object, ...] = ()
    """Values to choose from; empty: the values are those of the interval."""
    low: float = 0.0
    high: float = 0.0
    """Upper end of the interval, which belongs to it, as `low` does."""
    is_log: bool = False
    """Whether each factor in the interval is as likely, and not each difference."""
    is_whole: bool = False
    """Whether the interval has whole numbers only."""
    condition: Condition | None = None
    """Condition on another key, under which a trial has this key; None: all trials have it."""

    @property
    def texts(self) -> list[str]:
        """The choices as text of a command line, by which they are compared.

        JSON, from which values come back, has no tuples, and may change the type of a number.
        """
        return [as_text(choice) for choice in self.choices]

    def examples(self) -> tuple[object, ...]:
        """Give the choices, or both ends of the interval."""
        if self.choices:
            return self.choices
        return (int(self.low), int(self.high)) if self.is_whole else (self.low, self.high)

    def has(self, value: object) -> bool:
        """Whether a trial may have this value, as Python or JSON has it."""
        if self.choices:
            return as_text(value) in self.texts
        allowed_types = int if self.is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed_types):
            return False
        return self.low <= value <= self.high

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether a trial with these values of other keys has this key, too."""
        return self.condition is None or as_text(values.get(self.condition.key)) == self.condition.value


def parse_dimension(key: str, text: str, where: str) -> Dimension:
    """Read a key and its values.

    Args:
        key: a key of a run's config.
        text: the values, as the head of this file shows them.
        where: what has the text, for errors.

    Raises:
        ConfigError: this is not how values are written, or a run has no such key, or it must not vary.
    """
    place = f"{key} ({where})"
    body, _, condition_text = text.partition(_IF)
    _check_key(key, body, place)
    try:
        override = parse_override(f"{key}={body.strip()}")
    except HydraException as error:
        raise ConfigError("these are no values of a sweep", where=place, found=text, allowed=_ALLOWED) from error
    # `Override.value()`, which is public, gives a sweep as values alone, without its kind.
    values = override._value if override.is_sweep_override() else None
    condition = _parse_condition(condition_text, place) if condition_text else None
    if isinstance(values, IntervalSweep):
        return _interval(key, values, condition, place)
    if isinstance(values, RangeSweep):
        values = _list_range(key, values, body, place)
    if isinstance(values, ChoiceSweep) and values.list:
        choices: list[object] = []
        for item in values.list:
            # Quotes are taken off, also within lists and dicts.
            choice = Override._convert_value(item)
            if choice not in choices:
                choices.append(choice)
        return Dimension(key=key, choices=tuple(choices), condition=condition)
    raise ConfigError("these are no values of a sweep", where=place, found=text, allowed=_ALLOWED)


def _check_key(key: str, values: str, place: str) -> None:
    """Raise a ConfigError on a key that a run does not have, or that must not vary."""
    if key.partition(".")[0] in _NOT_SWEPT:
        raise ConfigError("this key must not vary", where=place, hint="a key of model, data, optimizer or train")
    in_free_mapping = any(known.is_free and key.startswith(f"{known.name}.") for known in all_keys().values())
    if find_key(key) is None and "." in key and not in_free_mapping:
        near = nearest_key(key)
        raise ConfigError(f"there is no key `{key}`", where=place, hint=None if near is None else f"{near}={values}")


def _list_range(key: str, found: RangeSweep, body: str, place: str) -> ChoiceSweep:
    """Give all numbers of a range as choices. ConfigError: the range is meant as an interval."""
    low, high = found.start, found.stop
    if isinstance(low, float) and isinstance(high, float) and found.step == 1 and 0 < high - low <= 1:
        what, hint = "this range has one value: its steps are of 1", f"'{key}=interval({low:g}, {high:g})'"
        raise ConfigError(what, where=place, found=body, hint=hint)
    return ChoiceSweep(list=list(found.range()))


def _parse_condition(text: str, place: str) -> Condition:
    key, equals, value = text.strip().partition("=")
    if not equals or not value:
        raise ConfigError("this is no condition", where=place, found=text, allowed="VALUES if KEY=VALUE")
    return Condition(key, value)


def _interval(key: str, found: IntervalSweep, condition: Condition | None, place: str) -> Dimension:
    """Give the dimension of an interval. ConfigError: the interval has no values, or no logarithms."""
    low, high = float(found.start or 0), float(found.end or 0)
    is_log, is_whole = "log" in found.tags, isinstance(found.start, int) and isinstance(found.end, int)
    has_values = math.isfinite(low) and math.isfinite(high) and low < high
    if not has_values or (is_log and low <= 0):
        allowed = "interval(LOW, HIGH) with LOW < HIGH" + (" and LOW > 0" if is_log else "")
        raise ConfigError("this interval has no values", where=place, found=f"{low:g} to {high:g}", allowed=allowed)
    return Dimension(key=key, low=low, high=high, is_log=is_log, is_whole=is_whole, condition=condition)


def is_sweep(text: str) -> bool:
    """Whether an override of the command line has several values."""
    body = text.partition(_IF)[0].strip()
    try:
        return bool(parse_override(body).is_sweep_override())
    except HydraException:
        # Composing the config says what is wrong with it.
        return False


class Space:
    """All dimensions of a sweep; dimensions with a condition on another key come last.

    Raises:
        ConfigError: nothing varies, a key varies twice, or a condition never holds.
    """

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        if not dimensions:
            what, hint = "nothing varies", "'optimizer.lr=choice(1e-4, 1e-3)'"
            raise ConfigError(what, where="sweep.space", allowed=_ALLOWED, hint=hint)
        for key, number in Counter(dimension.key for dimension in dimensions).items():
            if number > 1:
                what, once = "this key varies twice", "all values of a key in one place"
                raise ConfigError(what, where=key, found=f"{number} times", allowed=once)
        _check_conditions(dimensions)
        self.dimensions = sorted(dimensions, key=lambda dimension: dimension.condition is not None)

    def grid(self, most: int | None = None) -> list[dict[str, object]]:
        """Give all combinations of choices, as values by key.

        Args:
            most: number of combinations after which to stop: there may be more than memory holds; None: give all.

        Raises:
            ConfigError: a key has an interval, which has too many values for a grid.
        """
        for dimension in self.dimensions:
            if not dimension.choices:
                choices = f"'{dimension.key}=choice({dimension.low:g}, {dimension.high:g})'"
                what, hint = "a grid takes choices", f"{choices}, or sweep=random"
                raise ConfigError(what, where=dimension.key, found="an interval", hint=hint)
        return list(islice(_combinations(self.dimensions, {}), most))

    def examples(self) -> Iterator[dict[str, object]]:
        """Give the values of trials that have each end and each choice of each key, to be checked before a start."""
        first: dict[str, object] = {}
        for dimension in self.dimensions:
            if dimension.holds(first):
                first[dimension.key] = dimension.examples()[0]
        yield first
        for dimension in self.dimensions:
            condition, examples = dimension.condition, dimension.examples()
            # The first trial has the first value already, but perhaps no key that has a condition.
            for value in examples[1:] if condition is None else examples:
                values = {**first, dimension.key: value}
                if condition is not None:
                    values[condition.key] = condition.value
                # With another value of that key, conditions of other keys may not hold any more.
                yield {key: own for key, own in values.items() if self._by_key(key).holds(values)}

    def check(self, values: Mapping[str, object], where: str) -> None:
        """Refuse values of a trial that this space does not give.

        Args:
            values: values by key.
            where: the file and the line that the values come from.

        Raises:
            ConfigError: the trial has a key too many or too few, or a value that its key cannot have.
        """
        due = {dimension.key: dimension for dimension in self.dimensions if dimension.holds(values)}
        too_many = [key for key in values if key not in due]
        missing = [key for key in due if key not in values]
        bad_values = [key for key, one in due.items() if key in values and not one.has(values[key])]
        wrong = [*too_many, *missing, *bad_values]
        if not wrong:
            return
        key = wrong[0]
        found = as_override(key, values[key]) if key in values else f"no {key}"
        raise ConfigError(
            "this sweep has written no such trial",
            where=where,
            found=found[:200],
            allowed=f"{', '.join(due)}, each with a value of the sweep's space",
            hint="remove the line, or the folder; or sweep in another one, by another run.name",
        )

    def _by_key(self, key: str) -> Dimension:
        return next(one for one in self.dimensions if one.key == key)


def _check_conditions(dimensions: Sequence[Dimension]) -> None:
    """Raise a ConfigError on a condition that never holds."""
    choices = {one.key: one.texts for one in dimensions if one.choices and one.condition is None}
    for dimension in dimensions:
        condition = dimension.condition
        if condition is None or condition.value in choices.get(condition.key, []):
            continue
        known = choices.get(condition.key, [])
        raise ConfigError(
            "the condition never holds" if known else "the condition is on a key that is no choice here",
            where=dimension.key,
            found=f"{condition.key}={condition.value}",
            allowed=", ".join(known or sorted(choices)) or None,
            hint=nearest(condition.value, known, f"{condition.key}={{}}"),
        )


def _combinations(dimensions: Sequence[Dimension], values: dict[str, object]) -> Iterator[dict[str, object]]:
    """Give these values with each combination of choices of the dimensions, of which the last changes first."""
    if not dimensions:
        yield values
        return
    first, *others = dimensions
    if not first.holds(values):
        yield from _combinations(others, values)
        return
    for choice in first.choices:
        yield from _combinations(others, {**values, first.key: choice})
