"""The answers to a prompt as a message: tokens with log-probabilities, and what was said if they are episodes.

completions          [[5, 9, 1], ...]         all tokens of each answer, drawn and read
log_probabilities    [[-0.5, -1.2], ...]      the log-probability of each token that was drawn
episodes             [{"drawn": [true, false, true], "turns": [["assistant", "7", ""], ...], ...}, ...]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from hfdist.messages.message import MOST_BYTES, Message, NotAMessageError, as_message
from hfdist.rewards.generation import Turn
from hfdist.tune.answer import Answer

_ROLES = ("assistant", "tool", "user")


class ReadAnswer(NamedTuple):
    """An answer that was read from a message."""

    answer: Answer
    num_prompt_tokens: int | None = None
    """How many tokens of its prompt the model has read, from the first on; None: all."""


def write_answers(answers: Sequence[Answer], prompts: Sequence[list[int]] | None = None) -> dict[str, object]:
    """Give answers as JSON.

    Args:
        answers: the answers to one prompt.
        prompts: if they are episodes, the prompt of each as the model has read it; None: they are answers of one turn.
    """
    written: dict[str, object] = {
        "completions": [answer.tokens for answer in answers],
        "log_probabilities": [answer.log_probabilities or [] for answer in answers],
    }
    if prompts is not None:
        written["episodes"] = [_describe(*pair) for pair in zip(answers, prompts, strict=True)]
    return written


def _describe(answer: Answer, prompt: Sequence[int]) -> dict[str, object]:
    return {
        "prompt_tokens": len(prompt),
        "drawn": answer.is_drawn,
        "ended": answer.has_ended,
        "turns": answer.turns,
        "num_turns": answer.num_turns,
        "calls": answer.num_calls,
        "reward": answer.reward,
        "fault": answer.fault,
    }


def read_answers(message: Message, end_ids: Collection[int]) -> list[ReadAnswer]:
    """Read what `write_answers` has given; tokens and log-probabilities are left to `AnswerCheck`.

    Args:
        message: a message with answers.
        end_ids: tokens that end an answer of one turn.

    Raises:
        NotAMessageError: these are no answers.
    """
    completions, log_probabilities = message.list("completions"), message.list("log_probabilities")
    if len(completions) != len(log_probabilities):
        raise NotAMessageError("answers have not one of each")
    if "episodes" not in message:
        pairs = zip(completions, log_probabilities, strict=True)
        return [ReadAnswer(Answer.of(tokens, values, end_ids=end_ids)) for tokens, values in pairs]
    episodes = message.list("episodes")
    if len(episodes) != len(completions):
        raise NotAMessageError("answers have not one of each")
    return [_read_episode(*parts) for parts in zip(completions, log_probabilities, episodes, strict=True)]


def _read_episode(tokens: list[Any], log_probabilities: list[Any], described: object) -> ReadAnswer:
    episode = as_message(described)
    drawn = episode.list("drawn")
    if len(drawn) != len(tokens) or not all(type(one) is bool for one in drawn):
        raise NotAMessageError("an episode does not say of each token whether it was drawn")
    answer = Answer(
        tokens=tokens,
        is_drawn=drawn,
        has_ended=episode.flag("ended"),
        log_probabilities=log_probabilities,
        turns=[_read_turn(given) for given in episode.list("turns")],
        num_turns=episode.integer("num_turns"),
        num_calls=episode.integer("calls"),
        reward=episode.number("reward", least=-math.inf),
        fault=None if episode.get("fault") is None else episode.text("fault"),
    )
    return ReadAnswer(answer, episode.integer("prompt_tokens"))


def _read_turn(given: object) -> Turn:
    if not isinstance(given, list) or len(given) != len(Turn._fields):
        raise NotAMessageError("a turn is no list of role, text and name")
    said = Message(zip(Turn._fields, given, strict=True))
    role = said.text("role")
    if role not in _ROLES:
        raise NotAMessageError(f"nobody speaks as {role!r:.20} in an episode")
    return Turn(role, said.text("text", most=MOST_BYTES), said.text("name", most=MOST_BYTES))
