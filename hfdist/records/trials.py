"""What a sweep has done, in `sweep.jsonl`: all decisions are functions of these lines, whoever was killed meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfdist.records.lines import append_line, read_numbered

TRIALS, SETTINGS = "sweep.jsonl", "sweep.json"
"""Files in a sweep's folder: lines of trials, and what was asked when the sweep began."""
NOTES = "notes"
"""Key of the latter, which the end adds: what to know of the best trial, in words."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a trial at the end of a rung."""

    step: int
    tokens: int
    """Tokens that the trial had read by then."""
    value: float | None
    """Value of the metric; None: it was not finite, or there is none."""


@dataclass(kw_only=True)
class Trial:
    """One combination of values."""

    number: int
    values: dict[str, Any]
    parent: int | None = None
    """The trial at whose checkpoint it begins; None: at step 0."""
    results: list[Result] = field(default_factory=list)
    """One result for each rung whose end the trial has reached."""
    failure: str | None = None
    """Why it does not go on; None: it has not failed."""
    line: int | None = None
    """Number of its line in the file from which it was read, from 1; None: it has begun since then."""

    @property
    def value(self) -> float | None:
        """The newest value of the metric."""
        return self.results[-1].value if self.results else None

    @property
    def tokens(self) -> int:
        """Tokens that its model has read by the end of its newest rung."""
        return self.results[-1].tokens if self.results else 0


class TrialLog:
    """Reads the lines, leaves out those that no sweep has written, and adds new ones."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TRIALS
        self.trials: list[Trial] = []
        """Trials in order of their numbers."""
        for number, line in read_numbered(self.path):
            with suppress(KeyError, IndexError, TypeError, ValueError, OverflowError):
                self._take(line, number)

    def begin(self, values: Mapping[str, object], parent: int | None = None) -> Trial:
        """Add a trial."""
        of_parent = {} if parent is None else {"parent": parent}
        self._add({"trial": len(self.trials), "values": dict(values), **of_parent})
        return self.trials[-1]

    def reach(self, trial: Trial, result: Result) -> None:
        """Note that a trial has reached the end of its next rung."""
        place = {"step": result.step, "tokens": result.tokens, "value": result.value}
        self._add({"trial": trial.number, "rung": len(trial.results), **place})

    def fail(self, trial: Trial, failure: str) -> None:
        """Note that a trial does not go on."""
        self._add({"trial": trial.number, "failed": failure})

    def _add(self, line: Mapping[str, object]) -> None:
        append_line(self.path, line)
        self._take(line)

    def _take(self, line: Mapping[str, Any], number: int | None = None) -> None:
        if "values" in line:
            if line["trial"] != len(self.trials):
                raise ValueError("trials are numbered as they come")
            values, parent = line["values"], line.get("parent")
            if not isinstance(values, dict):
                raise TypeError("values have keys")
            trial = Trial(number=len(self.trials), values=values, line=number)
            trial.parent = None if parent is None else self._find(parent).number
            self.trials.append(trial)
        elif "failed" in line:
            self._find(line["trial"]).failure = str(line["failed"])
        else:
            value = None if line["value"] is None else float(line["value"])
            is_finite = value is not None and math.isfinite(value)
            result = Result(step=int(line["step"]), tokens=int(line["tokens"]), value=value if is_finite else None)
            self._find(line["trial"]).results.append(result)

    def _find(self, number: int) -> Trial:
        if number < 0:
            raise IndexError("trials are numbered from 0")
        return self.trials[number]


def rank_trials(trials: Sequence[Trial], *, sign: int, has_lengths: bool) -> list[Trial]:
    """Give the best first, and last those without a value; where trials have several lengths, the furthest first.

    Args:
        trials: the trials of one sweep.
        sign: 1 where lower values are better, -1 where higher ones are.
        has_lengths: whether a trial that has read more has come further; else its batch is larger.
    """

    def place(trial: Trial) -> tuple[bool, int, float, int]:
        value = trial.value
        return value is None, -trial.tokens * has_lengths, 0.0 if value is None else sign * value, trial.number

    return sorted(trials, key=place)
