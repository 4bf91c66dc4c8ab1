"""A text that a model generated from a prompt, with the reference to compare it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Turn(NamedTuple):
    """What one side says in an episode with an environment."""

    role: str
    """assistant: the model; tool: a result of a tool; user: another observation."""
    text: str
    """What it says, without special tokens."""
    name: str = ""
    """The name of the tool."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A prompt, its completion and its reference."""

    prompt: str
    text: str
    """The completion, without special tokens; of an episode with an environment the model's last turn."""
    reference: str
    """The completion in the data. In an evaluation it is, like `text`, at most `evaluate.max_new_tokens` long."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, as JSON has them (`data.keep_columns`)."""
    token_ids: tuple[int, ...] = ()
    """Token ids of prompt and completion, with special tokens; empty for metrics."""
    num_tokens: int = 0
    """Tokens of the completion, with the one that ends it and with observations; 0 for metrics."""
    most_tokens: int = 0
    """The most that it may have: `task.max_new_tokens`; 0 for metrics."""
    turns: tuple[Turn, ...] = ()
    """What was said after the prompt, in an episode with an environment."""
    environment_reward: float = 0.0
    """The sum of what the environment has given."""
