"""The environment `code`: the model writes a program, and may mend it once it knows how many tests it passes."""

from __future__ import annotations

from hfdist.environments.environment import Environment, Row, Step
from hfdist.rewards.code import code
from hfdist.rewards.generation import Generation


class Code(Environment):
    """Programs against the tests of the reference, each in the sandbox of the reward `code`.

    The reward of an episode is the largest share of the tests that one of its programs passes.
    """

    def reset(self, row: Row) -> None:
        """Take the tests."""
        self._tests, self._best = row.reference, 0.0

    def step(self, text: str) -> Step:
        """Run the program of a turn."""
        [share] = code([Generation(prompt="", text=text, reference=self._tests)])
        gain, self._best = max(0.0, share - self._best), max(share, self._best)
        if share == 1.0:
            return Step(None, gain, done=True)
        return Step(f"{share:.0%} of the tests pass. Write the whole program again.", gain)
