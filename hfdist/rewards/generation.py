"""What a model wrote after a prompt, and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A prompt that the model has continued."""

    prompt: str
    text: str
    """What the model wrote, without special tokens."""
    reference: str
    """What stands there in the data. In an evaluation it is, like `text`, at most `evaluate.max_new_tokens` long."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, as JSON has them (`data.keep_columns`)."""
    token_ids: tuple[int, ...] = ()
    """Token ids of the prompt and of what the model wrote, with special tokens; empty for metrics."""
