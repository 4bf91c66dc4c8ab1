"""Rewards of answers, or of the steps of answers, at the tokens that end the steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from hfdist.config.batch import IGNORED
from hfdist.rewards.registry import Steps
from hfdist.strategies.engine import Batch
from hfdist.tune.rollout_rows import REWARDS, STEP_ENDS, are_answered


def add_up(scores: Sequence[float | Steps], weights: Sequence[float], num_characters: int) -> Steps:
    """Add up what several rewards say of one answer, by the end of a step; a score of the whole ends with it."""
    totals: dict[int, float] = {}
    for score, weight in zip(scores, weights, strict=True):
        steps: Steps = [(num_characters, score)] if isinstance(score, float) else score
        for end, value in steps:
            totals[end] = totals.get(end, 0.0) + weight * value
    return sorted(totals.items())


def total(score: float | Steps) -> float:
    """Give what an answer gets in all."""
    return score if isinstance(score, float) else sum((value for _, value in score), 0.0)


def of_answers(steps: Sequence[Steps]) -> Batch:
    """Give REWARDS of a batch whose answers have a reward each; 0 where there is no answer."""
    return {REWARDS: torch.tensor([[total(own)] for own in steps])}


def of_steps(
    batch: Batch, steps: Sequence[Steps], decode: Callable[[Sequence[int]], str], *, num_columns: int
) -> Batch:
    """Give REWARDS and STEP_ENDS of a batch of answers.

    Args:
        batch: with an answer in each row.
        steps: of each row; none where there is no answer.
        decode: gives the text of tokens, as rewards read it.
        num_columns: most steps of an answer of this data rank.
    """
    rewards = torch.zeros(len(steps), num_columns)
    ends = torch.full((len(steps), num_columns), -1)
    for row, (labels, of_row) in enumerate(zip(batch["labels"], steps, strict=True)):
        places = (labels != IGNORED).nonzero()[:, 0]
        answer = labels[places].tolist()
        for column, (end, value) in enumerate(of_row):
            rewards[row, column] = value
            ends[row, column] = places[token_of(end, answer, decode)]
    return {REWARDS: rewards, STEP_ENDS: ends}


def token_of(end: int, answer: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Give the token of an answer with which its first `end` characters are there; of all of them, the last token."""
    if end >= len(decode(answer)):
        # Also one that ends the answer, and has no text.
        return len(answer) - 1
    return bisect_left(range(len(answer) - 1), end, key=lambda place: len(decode(answer[: place + 1])))


def are_given(batch: Batch) -> torch.Tensor:
    """Whether there is a reward; shape of REWARDS."""
    return batch[STEP_ENDS] >= 0 if STEP_ENDS in batch else are_answered(batch)[:, None]


def differ(batch: Batch, num_answers: int) -> torch.Tensor:
    """Whether the rewards of a prompt's answers differ; shape [prompts]."""
    groups = (len(batch["labels"]) // num_answers, -1)
    rewards, is_given = batch[REWARDS].reshape(groups), are_given(batch).reshape(groups)
    return torch.where(is_given, rewards, torch.inf).amin(1) < torch.where(is_given, rewards, -torch.inf).amax(1)
