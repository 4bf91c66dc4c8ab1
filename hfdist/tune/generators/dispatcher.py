"""Which generator answers which prompt, and which answers count: the first ones, by a policy that is not too old.

    add  ->  waiting  -- hand_out -->  at a generator  -- answer -->  answered  -- take -->  a rank trains on it
                ^                            |                           |
                +-- lose, or its time is up -+      (too old for its step)
                +----------------------------------------------------------+

A policy's version is the number of steps that have trained it. The prompts of step s are handed out once there is a
version of at least s - max_staleness, so that an answer is seldom thrown away. No processes and no sockets here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Answers(NamedTuple):
    """All completions of a prompt."""

    version: int
    """Version of the policy that gave the answers."""
    content: dict[str, object]
    """The completions, as the generator sent them."""


class HandedOut(NamedTuple):
    """A prompt at a generator."""

    version: int
    """Version of the policy that the generator answers with."""
    deadline_seconds: float
    """Time from which on another generator may get the prompt, too."""


@dataclass
class _Prompt:
    step: int
    """Number of the step that needs the prompt, from 0 on."""
    content: object
    """The prompt, as a generator gets it."""
    at: dict[str, HandedOut] = field(default_factory=dict)
    """Generators that have the prompt, by name."""
    answers: Answers | None = None
    """The answers that count; None: there are none yet."""


class Dispatcher:
    """Hands the prompts of one run to generators. Times are of any one clock, in seconds.

    Args:
        max_staleness: the most versions by which an answer's policy may be older than the one that it trains.
        answer_seconds: seconds after which a prompt is handed to another generator, too.
    """

    def __init__(self, *, max_staleness: int, answer_seconds: float) -> None:
        self._max_staleness, self.answer_seconds = max_staleness, answer_seconds
        self._prompts: dict[int, _Prompt] = {}
        """Prompts by their number in the run's data, until their answers are taken."""
        self.version: int | None = None
        """Version of the newest policy that generators can read."""
        self.num_thrown_away = 0
        """Number of prompts whose answers came twice, or were too old."""

    def forget(self) -> None:
        """Forget all: the run has gone back to an earlier step."""
        self._prompts, self.version = {}, None

    def publish(self, version: int) -> None:
        """Let generators use a newer policy."""
        self.version = version

    def add(self, number: int, step: int, content: object) -> None:
        """Take a prompt; one that is known stays as it is."""
        self._prompts.setdefault(number, _Prompt(step, content))

    def hand_out(self, generator: str, most: int, now_seconds: float) -> list[tuple[int, object]]:
        """Give a generator up to `most` prompts for the newest policy: number and content, the lowest numbers first."""
        given: list[tuple[int, object]] = []
        if self.version is None:
            return given
        for number in sorted(self._prompts):
            prompt = self._prompts[number]
            # Later prompts are of the same step, or of a later one: the policy is too old for them as well.
            if len(given) == most or self._staleness(prompt, self.version) > 0:
                break
            is_awaited = any(at.deadline_seconds > now_seconds for at in prompt.at.values())
            if prompt.answers is None and not is_awaited:
                prompt.at[generator] = HandedOut(self.version, now_seconds + self.answer_seconds)
                given.append((number, prompt.content))
        return given

    def answer(self, generator: str, number: int, version: int, content: dict[str, object]) -> None:
        """Take the answers of a generator. The first ones count, if they are not too old for the step."""
        prompt = self._prompts.get(number)
        if prompt is not None:
            prompt.at.pop(generator, None)
        if prompt is None or prompt.answers is not None or self._staleness(prompt, version) > 0:
            self.num_thrown_away += 1
        else:
            prompt.answers = Answers(version, content)

    def lose(self, generator: str) -> None:
        """Take back the prompts that a generator will not answer."""
        for prompt in self._prompts.values():
            prompt.at.pop(generator, None)

    def take(self, number: int, step: int) -> Answers | None:
        """Give the answers of a prompt for a step, and forget it; None: there are none yet.

        Answers that are too old for this step are thrown away, and the prompt is handed out again.
        """
        prompt = self._prompts[number]
        prompt.step = step
        if prompt.answers is not None and self._staleness(prompt, prompt.answers.version) > 0:
            prompt.answers = None
            self.num_thrown_away += 1
        if prompt.answers is not None:
            del self._prompts[number]
        return prompt.answers

    def drop_before(self, number: int) -> None:
        """Forget prompts with lower numbers, which no step has asked for."""
        for one in [one for one in self._prompts if one < number]:
            del self._prompts[one]

    def versions_in_use(self) -> set[int]:
        """Give the versions that generators may still read."""
        used = {at.version for prompt in self._prompts.values() for at in prompt.at.values()}
        return used if self.version is None else used | {self.version}

    def _staleness(self, prompt: _Prompt, version: int) -> int:
        """Give the number of versions by which an answer of this version would be too old; 0 or less: it is not."""
        return prompt.step - version - self._max_staleness
