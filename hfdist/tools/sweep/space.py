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

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from hfdist.config.likely_keys import nearest_key
from hfdist.config.override_text import as_override, as_text, parse_override
from hfdist.config.schema import all_keys, find_key
from hfdist.errors import ConfigError, nearest

_IF = " if "
_NOT_SWEPT = ("run", "launch", "report", "checkpoint")
_ALLOWED = "choice(a,b), range(1,9,2), interval(0,1), int(interval(1,8)), tag(log, interval(1e-5,1e-2))"


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A key that varies: one of `choices`, or a number between `low` and `high`."""

    key: str
    choices: tuple[object, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    condition: tuple[str, str] | None = None
    """Another key and the value that it must have, so that a trial has this one; None: all trials have it."""

    @property
    def texts(self) -> list[str]:
        """The choices as text of a command line: JSON has no tuples, and may change the type of a number."""
        return [as_text(choice) for choice in self.choices]

    def examples(self) -> tuple[object, ...]:
        """Give the choices, or both ends of the interval."""
        return self.choices or ((int(self.low), int(self.high)) if self.is_whole else (self.low, self.high))

    def has(self, value: object) -> bool:
        """Whether a trial may have this value, as Python or JSON has it."""
        if self.choices:
            return as_text(value) in self.texts
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.low <= value <= self.high

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether a trial with these other values has this key."""
        return self.condition is None or as_text(values.get(self.condition[0])) == self.condition[1]


def parse_dimension(key: str, text: str, where: str) -> Dimension:
    """Read a key's values.

    Raises:
        ConfigError: this is not how values are written, or the key is none of a run, or must not vary.
    """
    place = f"{key} ({where})"
    body, _, condition = text.partition(_IF)
    if key.partition(".")[0] in _NOT_SWEPT:
        raise ConfigError("this key must not vary", where=place, hint="a key of model, data, optimizer or train")
    in_free_mapping = any(known.is_free and key.startswith(f"{known.name}.") for known in all_keys().values())
    if find_key(key) is None and "." in key and not in_free_mapping:
        near = nearest_key(key)
        raise ConfigError(f"there is no key `{key}`", where=place, hint=None if near is None else f"{near}={body}")
    try:
        override = parse_override(f"{key}={body.strip()}")
    except HydraException as error:
        raise ConfigError("these are no values of a sweep", where=place, found=text, allowed=_ALLOWED) from error
    found = override._value if override.is_sweep_override() else None
    when = _condition(condition, place) if condition else None
    if isinstance(found, IntervalSweep):
        return _interval(key, found, when, place)
    if isinstance(found, RangeSweep):
        low, high = found.start, found.stop
        if isinstance(low, float) and isinstance(high, float) and 0 < high - low <= 1 == found.step:
            what, hint = "this range has one value: its steps are of 1", f"'{key}=interval({low:g}, {high:g})'"
            raise ConfigError(what, where=place, found=body, hint=hint)
        found = ChoiceSweep(list=list(found.range()))
    if isinstance(found, ChoiceSweep) and found.list:
        # Quotes are taken off, also within lists and dicts.
        choices = tuple(Override._convert_value(item) for item in found.list)
        # Repeated choices are left out.
        choices = tuple(choice for place, choice in enumerate(choices) if choice not in choices[:place])
        return Dimension(key=key, choices=choices, condition=when)
    raise ConfigError("these are no values of a sweep", where=place, found=text, allowed=_ALLOWED)


def _condition(text: str, place: str) -> tuple[str, str]:
    key, equals, value = text.strip().partition("=")
    if not equals or not value:
        raise ConfigError("this is no condition", where=place, found=text, allowed="VALUES if KEY=VALUE")
    return key, value


def _interval(key: str, found: IntervalSweep, condition: tuple[str, str] | None, place: str) -> Dimension:
    low, high = float(found.start or 0), float(found.end or 0)
    is_log, is_whole = "log" in found.tags, isinstance(found.start, int) and isinstance(found.end, int)
    fits = math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not is_log)
    if not fits:
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
    """All dimensions of a sweep; those that have a condition on others come last.

    Raises:
        ConfigError: there are none, a key varies twice, or a condition is on a key that does not vary so.
    """

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        if not dimensions:
            what, hint = "nothing varies", "'optimizer.lr=choice(1e-4, 1e-3)'"
            raise ConfigError(what, where="sweep.space", allowed=_ALLOWED, hint=hint)
        for key, number in Counter(one.key for one in dimensions).items():
            if number > 1:
                what, once = "this key varies twice", "all values of a key in one place"
                raise ConfigError(what, where=key, found=f"{number} times", allowed=once)
        self.dimensions = sorted(dimensions, key=lambda one: one.condition is not None)
        choices = {one.key: one.texts for one in dimensions if one.choices and one.condition is None}
        for one in dimensions:
            if one.condition is not None and one.condition[1] not in choices.get(one.condition[0], []):
                name, wanted = one.condition
                known = choices.get(name, [])
                what = "the condition never holds" if known else "the condition is on a key that is no choice here"
                allowed = ", ".join(known or sorted(choices)) or None
                near = nearest(wanted, known, f"{name}={{}}")
                raise ConfigError(what, where=one.key, found=f"{name}={wanted}", allowed=allowed, hint=near)

    def grid(self, most: int | None = None) -> list[dict[str, object]]:
        """Give the combinations, at most the first `most`: there may be more than memory holds.

        Raises:
            ConfigError: an interval has too many values for that.
        """
        for one in self.dimensions:
            if not one.choices:
                what, hint = "a grid takes choices", f"'{one.key}=choice({one.low:g}, {one.high:g})', or sweep=random"
                raise ConfigError(what, where=one.key, found="an interval", hint=hint)
        return list(islice(_combinations(self.dimensions, {}), most))

    def examples(self) -> Iterator[dict[str, object]]:
        """Give trials that have each extreme and each choice once, to be checked before anything starts."""
        first: dict[str, object] = {}
        for one in self.dimensions:
            if one.holds(first):
                first[one.key] = one.examples()[0]
        yield first
        for one in self.dimensions:
            for value in one.examples()[1:] if one.condition is None else one.examples():
                values = {**first, one.key: value}
                if one.condition is not None:
                    values[one.condition[0]] = one.condition[1]
                yield {key: v for key, v in values.items() if self._by_key(key).holds(values)}

    def check(self, values: Mapping[str, object], where: str) -> None:
        """Refuse values of a trial that this space does not give.

        Args:
            values: values by key.
            where: a file and its line, of unknown origin.

        Raises:
            ConfigError: a key is missing or too many, or a value is none of its key's.
        """
        due = [one for one in self.dimensions if one.holds(values)]
        keys = [one.key for one in due]
        wrong = [key for key in values if key not in keys] or [one.key for one in due if one.key not in values]
        wrong += [one.key for one in due if one.key in values and not one.has(values[one.key])]
        if wrong:
            found = as_override(wrong[0], values[wrong[0]]) if wrong[0] in values else f"no {wrong[0]}"
            hint = "remove the line, or the folder; or sweep in another one, by another run.name"
            raise ConfigError(
                "this sweep has written no such trial", where=where, found=found[:200],
                allowed=", ".join(keys) + ", each with a value of the sweep's space", hint=hint,
            )  # fmt: skip

    def _by_key(self, key: str) -> Dimension:
        return next(one for one in self.dimensions if one.key == key)


def _combinations(dimensions: Sequence[Dimension], values: dict[str, object]) -> Iterator[dict[str, object]]:
    """Give these values with each combination of choices of the dimensions, of which the last changes first."""
    if not dimensions:
        yield values
        return
    one, *others = dimensions
    if not one.holds(values):
        yield from _combinations(others, values)
        return
    for choice in one.choices:
        yield from _combinations(others, {**values, one.key: choice})
