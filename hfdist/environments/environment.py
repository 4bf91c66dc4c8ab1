"""What an environment is: it gets the text of a turn, and gives an observation or the end. It may offer tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an episode begins with."""

    prompt: str
    """The prompt, without special tokens."""
    reference: str
    """The completion in the data; empty where the data have none."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of the row, as JSON has them (`data.keep_columns`)."""
    seed: int = 0
    """64 bits that follow from `train.seed` and the prompt's number: all episodes of a prompt have the same."""


class Step(NamedTuple):
    """What comes of a turn. A plain tuple of the three is as good."""

    observation: str | None
    """What the model reads next; at the end it may be None."""
    reward: float = 0.0
    """Finite; it is added to the reward of the episode."""
    done: bool = False
    """Whether the episode ends here."""


class ToolError(Exception):
    """A tool cannot do what the model asked for. The model reads the message; the episode goes on."""


class Environment:
    """The environment of one episode. A class without arguments is the entry point: each episode has an own object.

    All methods of an object are called one after the other, but perhaps in several threads, and beside those of other
    objects. Any exception but `ToolError` fails the episode.
    """

    def reset(self, row: Row) -> str | None:
        """Begin; give what the model reads after the prompt, or None: nothing."""
        return None

    def tools(self) -> Sequence[Callable[..., object]]:
        """Give functions that the model can call. They have type hints, and docstrings with `Args:`.

        A result is a text, or becomes one as JSON.
        """
        return ()

    def step(self, text: str) -> Step | tuple[str | None, float, bool]:
        """Take the text of a turn in which the model called no tool. By default the episode ends with it."""
        return Step(None, done=True)

    def close(self) -> None:
        """Called once an episode is over, also where it failed, if `reset` was called."""
