"""The check of answers that come in a message, before a rank reads them: a sender of others is no generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.messages.message import Message, NotAMessageError
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answers import read_answers


@dataclass(frozen=True, kw_only=True)
class AnswerCheck:
    """The bounds that answers to one prompt must keep."""

    num_generations: int
    """Number of completions of each prompt."""
    max_new_tokens: int
    """The most tokens of a completion."""
    vocabulary: int
    """Number of tokens that the model has."""
    max_turns: int | None = None
    """The most turns of the model in an episode; None: an answer is one turn."""

    def count_tokens(self, message: Message) -> int:
        """Check all answers to a prompt, and count the tokens that were drawn in them.

        Raises:
            NotAMessageError: the message has another number of answers, a token that the model does not have, or not
                one log-probability for each drawn token; or episodes where answers of one turn should be, or the other
                way round.
        """
        has_episodes, wants_episodes = "episodes" in message, self.max_turns is not None
        if has_episodes != wants_episodes:
            raise NotAMessageError("these are no answers of one turn, or no episodes")
        for name in ("completions", "log_probabilities"):
            if not all(isinstance(values, list) for values in message.list(name)):
                raise NotAMessageError(f"{name} are no lists")
        answers = [given.answer for given in read_answers(message, ())]
        if len(answers) != self.num_generations:
            raise NotAMessageError(f"a prompt has not {self.num_generations} completions")
        return sum(map(self._check, answers))

    def _check(self, answer: Answer) -> int:
        """Check one answer, and count the tokens that were drawn in it."""
        num_drawn = sum(answer.is_drawn)
        # An episode may fail before its first token.
        least = 0 if answer.fault is not None else 1
        if num_drawn < least or len(answer.tokens) > self.max_new_tokens:
            raise NotAMessageError(f"a completion has not from 1 to {self.max_new_tokens} tokens")
        # `type`, and not `isinstance`: True is an int, and no token.
        if not all(type(token) is int and 0 <= token < self.vocabulary for token in answer.tokens):
            raise NotAMessageError("completions are no tokens of the model")
        values = answer.log_probabilities or []
        are_finite = all(type(value) in (int, float) and math.isfinite(value) for value in values)
        if len(values) != num_drawn or not are_finite:
            raise NotAMessageError("a token has no finite log-probability")
        if self.max_turns is not None and answer.num_turns > self.max_turns:
            raise NotAMessageError(f"an episode has more than {self.max_turns} turns")
        return num_drawn
