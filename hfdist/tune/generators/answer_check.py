"""What answers must be before a rank reads them: whoever sends others is no generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.messages.message import Message, NotAMessageError
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answers import read_answers


@dataclass(frozen=True, kw_only=True)
class AnswerCheck:
    """Bounds of the answers to one prompt."""

    num_generations: int
    """Completions of each prompt."""
    max_new_tokens: int
    vocabulary: int
    """Number of tokens that the model has."""
    max_turns: int | None = None
    """The most turns of the model in an episode; None: an answer is one turn."""

    def count_tokens(self, message: Message) -> int:
        """Count the tokens that were drawn in all answers to a prompt.

        Raises:
            NotAMessageError: they are not so many answers of such tokens, with one log-probability for each drawn one,
                or they are episodes where there should be none, or the other way round.
        """
        if ("episodes" in message) != (self.max_turns is not None):
            raise NotAMessageError("these are no answers of one turn, or no episodes")
        for name in ("completions", "log_probabilities"):
            if not all(isinstance(values, list) for values in message.list(name)):
                raise NotAMessageError(f"{name} are no lists")
        answers = [given.answer for given in read_answers(message, ())]
        if len(answers) != self.num_generations:
            raise NotAMessageError(f"a prompt has not {self.num_generations} completions")
        return sum(map(self._check, answers))

    def _check(self, answer: Answer) -> int:
        # An episode may fail before its first token.
        least = 0 if answer.fault is not None else 1
        if not least <= len(answer.tokens) <= self.max_new_tokens or sum(answer.is_drawn) < least:
            raise NotAMessageError(f"a completion has not from 1 to {self.max_new_tokens} tokens")
        if not all(type(token) is int and 0 <= token < self.vocabulary for token in answer.tokens):
            raise NotAMessageError("completions are no tokens of the model")
        values = answer.log_probabilities or []
        is_each = len(values) == sum(answer.is_drawn)
        if not is_each or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise NotAMessageError("a token has no finite log-probability")
        if self.max_turns is not None and answer.num_turns > self.max_turns:
            raise NotAMessageError(f"an episode has more than {self.max_turns} turns")
        return len(values)
