"""Rewards of answers, or of the steps of answers, as tensors of a batch: each at the token that ends its step.

A reward scores texts, so a step ends with a character, and the token is found with which this character is there:

    answer    "2+2=4 so 4"                     steps [(5, 0.5), (10, 1.0)]: up to character 5, and up to 10
    tokens    "2" "+" "2" "=4" " so" " 4"      STEP_ENDS: the places of "=4" and " 4"; REWARDS: 0.5 and 1.0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from hfdist.config.batch import IGNORED
from hfdist.rewards.registry import Steps
from hfdist.strategies.engine import Batch
from hfdist.tune.rollout_rows import REWARDS, STEP_ENDS, are_answered


def add_up(scores: Sequence[float | Steps], weights: Sequence[float], num_characters: int) -> Steps:
    """Add up the weighted scores of one answer by several rewards, for each end of a step.

    Args:
        scores: a score of the whole answer, or scores of its steps, by each reward; the whole is a step to the end.
        weights: weight of each reward.
        num_characters: characters of the answer.

    Returns:
        The end of each step, in characters, with its score, in order.
    """
    totals: dict[int, float] = {}
    for score, weight in zip(scores, weights, strict=True):
        steps: Steps = [(num_characters, score)] if isinstance(score, float) else score
        for end, value in steps:
            totals[end] = totals.get(end, 0.0) + weight * value
    return sorted(totals.items())


def total(score: float | Steps) -> float:
    """Give the score of a whole answer, or the sum of the scores of its steps."""
    return score if isinstance(score, float) else sum((value for _, value in score), 0.0)


def of_answers(steps: Sequence[Steps]) -> Batch:
    """Give REWARDS of a batch, the total of each answer's steps, of shape [rows, 1]; 0 where there is no answer."""
    return {REWARDS: torch.tensor([[total(row_steps)] for row_steps in steps])}


def of_steps(
    batch: Batch, steps: Sequence[Steps], decode: Callable[[Sequence[int]], str], *, num_columns: int
) -> Batch:
    """Give REWARDS and STEP_ENDS of a batch of answers, both of shape [rows, num_columns].

    Args:
        batch: a batch with an answer in each row.
        steps: steps of each row's answer; none where there is no answer.
        decode: gives the text of tokens, as rewards read it.
        num_columns: the most steps of an answer of this data rank.
    """
    rewards = torch.zeros(len(steps), num_columns)
    ends = torch.full((len(steps), num_columns), -1)
    for row, (labels, row_steps) in enumerate(zip(batch["labels"], steps, strict=True)):
        places = (labels != IGNORED).nonzero()[:, 0]
        answer = labels[places].tolist()
        for column, (end, value) in enumerate(row_steps):
            rewards[row, column] = value
            ends[row, column] = places[token_of(end, answer, decode)]
    return {REWARDS: rewards, STEP_ENDS: ends}


def token_of(end: int, answer: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Give the place of the first token with which the first `end` characters of an answer are there."""
    if end >= len(decode(answer)):
        # The last token may be one that ends the answer, and has no text.
        return len(answer) - 1
    return bisect_left(range(len(answer) - 1), end, key=lambda place: len(decode(answer[: place + 1])))


def are_given(batch: Batch) -> torch.Tensor:
    """Whether there is a reward; shape of REWARDS."""
    return batch[STEP_ENDS] >= 0 if STEP_ENDS in batch else are_answered(batch)[:, None]


def differ(batch: Batch, num_answers: int) -> torch.Tensor:
    """Whether the rewards of a prompt's answers differ; shape [prompts]. Each `num_answers` rows have one prompt."""
    groups = (len(batch["labels"]) // num_answers, -1)
    rewards, is_given = batch[REWARDS].reshape(groups), are_given(batch).reshape(groups)
    lowest = torch.where(is_given, rewards, torch.inf).amin(1)
    highest = torch.where(is_given, rewards, -torch.inf).amax(1)
    return lowest < highest
