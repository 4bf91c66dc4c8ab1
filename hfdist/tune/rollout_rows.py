"""Prompts out of a batch of the data, and a batch of answers with an answer in each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hfdist.config.batch import IGNORED
from hfdist.data.documents.examples import Example
from hfdist.data.packing.row_images import split_images
from hfdist.data.packing.sequence import stack_rows
from hfdist.strategies.engine import Batch
from hfdist.trainer.generation.row_images import RowImages
from hfdist.tune.answer import Answer

REWARDS = "rewards"
"""Key in a batch: the reward of each answer, or of each of its steps; shape [rows, 1] or [rows, steps]."""
STEP_ENDS = "step_ends"
"""Key in a batch, if a reward scores steps: the place of the token that ends a step; -1: none; shape of REWARDS."""
ADVANTAGES = "advantages"
"""Key in a batch: the advantage of each answer, or of each token; shape [rows] or [rows, tokens]."""
TRAINS = "trains"
"""Key in a batch, if some answers do not train: whether a row does; true of rows without an answer; shape [rows]."""
OLD_LOG_PROBABILITIES = "old_log_probabilities"
"""Key in a batch of generators' answers: log-probabilities of the tokens when they were drawn; shape [rows, tokens]."""

LEAST_TOKENS = 2
"""Tokens of a row at least: of one alone no next token is predicted."""


def fill_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the token that fills up rows."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def are_answered(batch: Batch) -> torch.Tensor:
    """Whether a row is an answer, also one that failed before its first token; shape [rows]."""
    is_one = (batch["labels"] != IGNORED).any(1)
    return is_one | ~batch[TRAINS] if TRAINS in batch else is_one


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Whether a token is one of an answer that trains; shape [rows, tokens]."""
    is_target = batch["labels"] != IGNORED
    return is_target & batch[TRAINS][:, None] if TRAINS in batch else is_target


def read_examples(batch: Batch, room: int | None) -> list[Example]:
    """Split each row, of one document, at its first run of targets; of a longer prompt the last `room` tokens stay.

    Nothing is the prompt of a row without targets, and it has no images. Images come with their rows: `split_images`.
    """
    found = []
    names, images = ("input_ids", "labels", "attention_mask"), split_images(batch)
    for ids, labels, mask, seen in zip(*(batch[name].tolist() for name in names), images, strict=True):
        stop = sum(mask)
        first = next((place for place in range(stop) if labels[place] != IGNORED), 0)
        end = next((place for place in range(first, stop) if labels[place] == IGNORED), stop)
        prompt = ids[:first] if room is None else ids[:first][-room:]
        own = seen if first else {}
        reference = ids[first:end] if first else []
        # The same object each time: by it the answers to a prompt share what is read of it.
        found.append(Example(prompt=prompt, reference=reference, images=_giving(own)))
    return found


def _giving(images: Mapping[str, torch.Tensor]) -> Callable[[], Mapping[str, torch.Tensor]]:
    return lambda: images


def make_image_rows(
    prompts: Sequence[Sequence[int]], answers: Sequence[Answer], images: RowImages, *, fill_id: int, needs_image: bool
) -> Batch:
    """Make a batch as `make_rows` does, of rows with images: a mask says what fills up, in place of positions.

    `needs_image`: as of `stack_rows`.
    """
    rows = []
    for prompt, answer, seen in zip(prompts, answers, images.rows, strict=True):
        # So that no batch is empty, and no mask is all zeros: a row without a prompt is filling.
        filling = [fill_id] * (LEAST_TOKENS - len(prompt) - len(answer.tokens))
        ids = np.array([*prompt, *answer.tokens, *filling], dtype=np.int64)
        is_target = np.array([False] * len(prompt) + answer.is_drawn + [False] * len(filling), dtype=np.bool_)
        are_features = np.zeros(len(ids), dtype=np.bool_)
        are_features[: len(prompt)] = images.tokens.are_features(prompt)
        rows.append({**images.tokens.row(ids, are_features, np.where(is_target, ids, IGNORED)), **seen})
    return stack_rows(rows, fill_id, images.tokens, needs_image=needs_image)


def make_rows(prompts: Sequence[Sequence[int]], answers: Sequence[Answer], *, fill_id: int) -> Batch:
    """Make a batch with a prompt and its answer in each row; the tokens that the model has drawn are targets."""
    lengths = [len(prompt) + len(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(LEAST_TOKENS, *lengths)
    batch = {
        "input_ids": torch.full((len(lengths), width), fill_id),
        "labels": torch.full((len(lengths), width), IGNORED),
        "position_ids": torch.zeros((len(lengths), width), dtype=torch.int64),
    }
    for row, (prompt, answer, length) in enumerate(zip(prompts, answers, lengths, strict=True)):
        tokens = torch.tensor(answer.tokens, dtype=torch.int64)
        is_drawn = torch.tensor(answer.is_drawn, dtype=torch.bool)
        batch["input_ids"][row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        batch["input_ids"][row, len(prompt) : length] = tokens
        batch["labels"][row, len(prompt) : length] = tokens.where(is_drawn, IGNORED)
        batch["position_ids"][row] = torch.cat([torch.arange(length), torch.arange(width - length)])
    return batch


def at_targets(labels: torch.Tensor, values: Sequence[Sequence[float]]) -> torch.Tensor:
    """Put the values of each row where its targets are; 0 elsewhere."""
    placed = torch.zeros(labels.shape)
    placed[labels != IGNORED] = torch.tensor([value for row in values for value in row])
    return placed
