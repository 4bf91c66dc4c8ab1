"""The sampler of a Trainer's own model, and its answers of one turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Forward
from hfdist.trainer.generation.continuation import can_use_cache
from hfdist.trainer.generation.limits import find_limits
from hfdist.trainer.generation.row_images import RowImages
from hfdist.trainer.generation.sampling import Sampler, Sampling
from hfdist.trainer.training import Training
from hfdist.tune.answer import Answer


def make_sampler(training: Training, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> Sampler:
    """Make it. A collective; ConfigError: `task.max_new_tokens` leaves no room for a prompt."""
    topology = training.strategy.topology
    images = None if training.stream is None else training.stream.images
    return Sampler(
        limits=find_limits(training.model, tokenizer, task.max_new_tokens, where="task.max_new_tokens"),
        sampling=Sampling.of(task),
        topology=topology,
        uses_cache=can_use_cache(cast(PreTrainedModel, training.model), topology, images),
    )


def answer_prompts(
    sampler: Sampler,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    forward: Forward,
    *,
    rows_at_once: int,
    fill_id: int,
    images: RowImages | None = None,
) -> list[Answer]:
    """Give an answer to each prompt, and none to one without tokens. A collective; see `Sampler.draw`."""
    # All ranks sample equally many rows.
    rows = [prompt or [fill_id] for prompt in prompts]
    drawn = sampler.draw(rows, seeds, forward, rows_at_once=rows_at_once, images=images)
    ends = sampler.limits.end_ids
    return [Answer.of(*one, end_ids=ends) if prompt else Answer() for prompt, one in zip(prompts, drawn, strict=True)]
