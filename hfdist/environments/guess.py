"""The environment `guess`: the model guesses the number of the reference, and reads whether that is higher or lower."""

from __future__ import annotations

import re

from hfdist.environments.environment import Environment, Row, Step
from hfdist.errors import DataError

_NUMBER = re.compile(r"(?<![0-9])-?[0-9]{1,18}(?![0-9])")


class Guess(Environment):
    """A guessing game; the reward is 1.0 with the right guess."""

    def reset(self, row: Row) -> None:
        """Take the number; DataError: the reference is none."""
        found = _NUMBER.fullmatch(row.reference.strip())
        if found is None:
            what, allowed = "the reference is no whole number", "a whole number of up to 18 digits"
            raise DataError(what, where="environment guess", found=row.reference, allowed=allowed)
        self._number = int(found[0])

    def step(self, text: str) -> Step:
        """Compare the last number of a turn."""
        guesses = _NUMBER.findall(text)
        if not guesses:
            return Step("a number, please")
        guess = int(guesses[-1])
        if guess == self._number:
            return Step(None, reward=1.0, done=True)
        return Step("higher" if guess < self._number else "lower")
