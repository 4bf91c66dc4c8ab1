"""One episode on the side of the environment: texts of turns go in, what the model reads next comes out.

All that an environment does wrong becomes an exception here, which costs its own episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hfdist.environments.environment import Environment, Row, Step
from hfdist.environments.registry import Factory
from hfdist.environments.tools import MOST_CALLS, Call, Schema, do_call
from hfdist.rewards.generation import Turn

MOST_OBSERVED_BYTES = 2**16
"""The most bytes that an environment may give at once, in UTF-8."""


class FaultError(Exception):
    """An environment gives what it may not."""


class Reply(NamedTuple):
    """What comes of a turn."""

    said: Sequence[Turn]
    """What the model reads next; empty at the end, or where it reads nothing."""
    reward: float = 0.0
    done: bool = False
    num_calls: int = 0
    """Number of tools that the model has called."""


class Player:
    """The environment of one episode.

    Args:
        factory: makes it.
        row: what the episode begins with.
        schemas: JSON schemas of its tools, by name.
    """

    def __init__(self, factory: Factory, row: Row, schemas: Mapping[str, Schema]) -> None:
        self._factory, self._row, self._schemas = factory, row, schemas
        self._environment: Environment | None = None

    def begin(self) -> Reply:
        """Make the environment and begin the episode."""
        self._environment = self._factory()
        self._tools = {tool.__name__: tool for tool in self._environment.tools()}
        first = self._environment.reset(self._row)
        return Reply([] if first is None else [_observed("user", first)])

    def take(self, text: str, calls: Sequence[Call]) -> Reply:
        """Take a turn of the model, and the calls that are in it."""
        assert self._environment is not None
        if not (calls and self._tools):
            step = _read(self._environment.step(text))
            said = [] if step.observation is None else [_observed("user", step.observation)]
            return Reply(said, float(step.reward), step.done)
        said = [_observed("tool", do_call(call, self._tools, self._schemas), call.name) for call in calls[:MOST_CALLS]]
        if len(calls) > MOST_CALLS:
            said.append(_observed("tool", f"error: only the first {MOST_CALLS} calls were done"))
        _check_size("".join(turn.text for turn in said))
        return Reply(said, num_calls=len(calls))

    def close(self) -> Reply:
        """End the episode."""
        if self._environment is not None:
            self._environment.close()
        return Reply([], done=True)


def _read(given: object) -> Step:
    """Check what `step` gives; FaultError: it is no step."""
    allowed = "(observation: str | None, reward: a finite number, done: bool)"
    if not isinstance(given, tuple) or len(given) != 3:
        raise FaultError(f"step gives {given!r:.80}, and not {allowed}")
    observation, reward, done = given
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    if not is_number or not isinstance(done, bool) or not isinstance(observation, str | None):
        raise FaultError(f"step gives {given!r:.80}, and not {allowed}")
    if observation is None and not done:
        raise FaultError("step gives no observation, and the episode goes on")
    return Step(observation, reward, done)


def _observed(role: str, text: object, name: str = "") -> Turn:
    """Give what the model reads next; FaultError: it is no text, or too long."""
    if not isinstance(text, str):
        raise FaultError(f"an observation is no text: {text!r:.80}")
    _check_size(text)
    return Turn(role, text, name)


def _check_size(text: str) -> None:
    if (size := len(text.encode())) > MOST_OBSERVED_BYTES:
        raise FaultError(f"an observation has {size:,} bytes; at most {MOST_OBSERVED_BYTES:,}")
