"""The limits of a continuation: the tokens that end it and its length, as the model and its tokenizer say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfdist.errors import ConfigError

if TYPE_CHECKING:
    # Who speaks with a server needs no transformers.
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_KEY = "evaluate.max_new_tokens"


@dataclass(frozen=True, kw_only=True)
class GenerationLimits:
    """The tokens and the length that end a continuation."""

    max_new_tokens: int
    end_ids: frozenset[int]
    """Tokens that end it."""
    most_tokens: int | None
    """The most tokens that the model can read; None: any number."""
    where: str = _KEY
    """The key of `max_new_tokens`, for errors."""

    def room(self) -> int | None:
        """The most tokens of a prompt; ConfigError: `max_new_tokens` leaves none."""
        if self.most_tokens is None:
            return None
        if self.max_new_tokens >= self.most_tokens:
            what = "so many new tokens leave the model no room for a prompt"
            allowed = f"< {self.most_tokens}, the positions of the model"
            raise ConfigError(what, where=self.where, found=self.max_new_tokens, allowed=allowed)
        return self.most_tokens - self.max_new_tokens

    def cut(self, prompt: Sequence[int], budget: int) -> list[int]:
        """Give the end of a prompt, as much as leaves the model room for `budget` new tokens."""
        return list(prompt if self.most_tokens is None else prompt[-(self.most_tokens - budget) :])


def find_end_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Give the tokens that end an answer: chat models may end it with another one than a document."""
    ends = getattr(generation, "eos_token_id", None)
    return frozenset({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})


def find_limits(
    model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, *, where: str = _KEY
) -> GenerationLimits:
    """Read the limits off a model and its tokenizer; ConfigError, of the key `where`: no room for a prompt."""
    # Imported late: it imports transformers, and who only reads limits need not wait for that.
    from hfdist.models.position_limit import most_positions

    end_ids = find_end_ids(getattr(model, "generation_config", None), tokenizer)
    limits = GenerationLimits(
        max_new_tokens=max_new_tokens, end_ids=end_ids, most_tokens=most_positions(model.config), where=where
    )
    # Called for its error alone.
    limits.room()
    return limits
