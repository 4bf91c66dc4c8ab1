"""Before a pipeline reads images: which features must travel so that stages train as the whole model?

Tried on a small model of the type, each of whose blocks is a stage. Most types need none: the first stage puts features
into the states, and later stages make positions and masks from tokens and from the sizes of images. Some also add
features to the states after their first blocks. A stage without them gives no NaN, only other numbers, so losses and
gradients are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import PartitionError, first_line
from hfdist.models.cache_use import without_cache
from hfdist.models.differences import largest_difference
from hfdist.models.image_text import ImageBatch, make_small, read_images
from hfdist.pipeline.image_features import keep_features
from hfdist.pipeline.split import run_in_turn, stages_of_one_block
from hfdist.pipeline.stage_io import CARRIES, Carry

_BOUND = 1e-4
"""Largest relative difference of the loss and of a gradient."""

_Batch = Mapping[str, torch.Tensor]


class _Pass(NamedTuple):
    """What a forward and its backward give."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    """By the parameter's name; parameters without a gradient are left out."""


def find_features(architecture: PreTrainedConfig, batches: Sequence[_Batch]) -> ImageBatch:
    """Give the first batch with the fields of features that must travel in a pipeline. Needs no process group.

    Args:
        architecture: of the model.
        batches: what a forward takes, with labels: of a row with an image, then of packed rows where the run has such.

    Raises:
        PartitionError: a type that cannot be split where rows have images, or cannot be tried.
    """
    problems = []
    try:
        small = make_small(architecture)
        # With a cache, restarting positions are not looked at.
        with without_cache(small.config):
            passes = [_backward(small, small(**batch).loss) for batch in batches]
            for example in _candidates(small, batches[0]):
                read_images(small, unreached=(), example=example)
                for carry in CARRIES:
                    found = (_try(small, *tried, carry) for tried in zip(batches, passes, strict=True))
                    problem = next((problem for problem in found if problem is not None), None)
                    if problem is None:
                        return example
                    problems.append(problem)
    except Exception as error:  # whatever a model raises that cannot be made small
        problems = [f"it cannot be tried: {first_line(error)}"]
    raise PartitionError(
        "the stages of a pipeline do not train this type of model on images as one process does",
        where="strategy.pipeline",
        found=f"{architecture.model_type}, made small: {problems[0]}",
        allowed="1 for this type",
        hint="strategy=fsdp2",
    )


def _candidates(small: PreTrainedModel, batch: _Batch) -> Iterator[ImageBatch]:
    """Give the batch with no field of features, with each of them alone, and with all."""
    yield ImageBatch(batch)
    seen: list[str] = []
    # Its hooks stay: so not on the model itself.
    hooked = copy.deepcopy(small)
    keep_features(hooked, seen.extend)
    with torch.no_grad():
        hooked(**batch)
    names = list(dict.fromkeys(seen))
    yield from (ImageBatch(batch, frozenset([name])) for name in names)
    yield ImageBatch(batch, frozenset(names))


def _try(small: PreTrainedModel, batch: _Batch, whole: _Pass, carry: Carry) -> str | None:
    """Say why stages do not train as the whole model does, whose pass is given; None: they do."""
    try:
        stages = stages_of_one_block(small, carry)
        split = _backward(small, run_in_turn(stages, lambda model: model(**batch)).loss)
    except Exception as error:  # whatever a model raises whose blocks need more
        return first_line(error)
    without = next((name for name in whole.gradients if name not in split.gradients), None)
    if without is not None:
        return f"{without} has no gradient"
    in_order = [split.gradients[name] for name in whole.gradients]
    difference = largest_difference(whole.loss, split.loss, whole.gradients.values(), in_order)
    # So that a difference that is not a number is a problem, too.
    return None if difference <= _BOUND else f"the loss, or a gradient, differs by {difference:.0e}"


def _backward(model: PreTrainedModel, loss: torch.Tensor) -> _Pass:
    """Run the backward of a loss, and leave the model without gradients."""
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Pass(loss.detach(), gradients)
