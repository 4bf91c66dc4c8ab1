"""The answers to a prompt as a message: tokens with their log-probabilities, and of an episode what was said in it.

completions          [[5, 9, 1], ...]         all tokens of each answer, read ones too
log_probabilities    [[-0.5, -1.2], ...]      of the tokens that were drawn
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
    """An answer, and of an episode how many tokens of its prompt the model has read; None: all."""

    answer: Answer
    num_prompt_tokens: int | None = None


def write_answers(answers: Sequence[Answer], prompts: Sequence[list[int]] | None = None) -> dict[str, object]:
    """Describe answers; `prompts`: of episodes, as the model has read them."""
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
    """Read answers. NotAMessageError: they are none; what their tokens are is not looked at."""
    completions, values = message.list("completions"), message.list("log_probabilities")
    episodes = message.list("episodes") if "episodes" in message else [None] * len(completions)
    if not len(completions) == len(values) == len(episodes):
        raise NotAMessageError("answers have not one of each")
    return [
        ReadAnswer(Answer.of(tokens, own, end_ids=end_ids)) if episode is None else _read(tokens, own, episode)
        for tokens, own, episode in zip(completions, values, episodes, strict=True)
    ]


def _read(tokens: list[Any], log_probabilities: list[Any], described: object) -> ReadAnswer:
    episode = as_message(described)
    drawn = episode.list("drawn")
    if len(drawn) != len(tokens) or not all(type(one) is bool for one in drawn):
        raise NotAMessageError("an episode does not say of each token whether it was drawn")
    answer = Answer(
        tokens=tokens,
        is_drawn=drawn,
        has_ended=episode.flag("ended"),
        log_probabilities=log_probabilities,
        turns=[_turn(one) for one in episode.list("turns")],
        num_turns=episode.integer("num_turns"),
        num_calls=episode.integer("calls"),
        reward=episode.number("reward", least=-math.inf),
        fault=None if episode.get("fault") is None else episode.text("fault"),
    )
    return ReadAnswer(answer, episode.integer("prompt_tokens"))


def _turn(given: object) -> Turn:
    if not isinstance(given, list) or len(given) != len(Turn._fields):
        raise NotAMessageError("a turn is no list of role, text and name")
    said = Message(zip(Turn._fields, given, strict=True))
    role = said.text("role")
    if role not in _ROLES:
        raise NotAMessageError(f"nobody speaks as {role!r:.20} in an episode")
    return Turn(role, said.text("text", most=MOST_BYTES), said.text("name", most=MOST_BYTES))
