"""What answers must be before a rank reads them: whoever sends others is no generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.messages.message import Message, NotAMessageError


@dataclass(frozen=True, kw_only=True)
class AnswerCheck:
    """Bounds of the answers to one prompt."""

    num_generations: int
    """Completions of each prompt."""
    max_new_tokens: int
    vocabulary: int
    """Number of tokens that the model has."""

    def count_tokens(self, answers: Message) -> int:
        """Count the tokens of all completions of a prompt.

        Raises:
            NotAMessageError: they are not so many lists of such tokens, with one log-probability for each token.
        """
        completions, log_probabilities = answers.list("completions"), answers.list("log_probabilities")
        if not len(completions) == len(log_probabilities) == self.num_generations:
            raise NotAMessageError(f"a prompt has not {self.num_generations} completions")
        for tokens, values in zip(completions, log_probabilities, strict=True):
            if not (isinstance(tokens, list) and 1 <= len(tokens) <= self.max_new_tokens):
                raise NotAMessageError(f"a completion has not from 1 to {self.max_new_tokens} tokens")
            if not all(type(token) is int and 0 <= token < self.vocabulary for token in tokens):
                raise NotAMessageError("completions are no tokens of the model")
            is_each = isinstance(values, list) and len(values) == len(tokens)
            if not is_each or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
                raise NotAMessageError("a token has no finite log-probability")
        return sum(map(len, completions))
