"""Before a pipeline reads images: which features must travel so that stages train as the whole model?

Tried on a small model of the type, each of whose blocks is a stage. Most types need none: the first stage puts features
into the states, and later stages make positions and masks from tokens and from the sizes of images. Some also add
features to the states after their first blocks, which NaN cannot tell, as nothing is missed there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

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
_Gradients = dict[str, torch.Tensor]


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
            whole = [_run(small, small(**batch).loss) for batch in batches]
            for example in _candidates(small, batches[0]):
                read_images(small, unreached=(), example=example)
                for carry in CARRIES:
                    found = (_try(small, *tried, carry) for tried in zip(batches, whole, strict=True))
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
    """No features, the fields one by one, and all."""
    yield ImageBatch(batch)
    names: list[str] = []
    apart = copy.deepcopy(small)
    keep_features(apart, names.extend)
    with torch.no_grad():
        apart(**batch)
    names = list(dict.fromkeys(names))
    yield from (ImageBatch(batch, frozenset([name])) for name in names)
    yield ImageBatch(batch, frozenset(names))


def _try(small: PreTrainedModel, batch: _Batch, whole: tuple[torch.Tensor, _Gradients], carry: Carry) -> str | None:
    """Say why stages do not train as the whole model, whose loss and gradients are given; None: they do."""
    try:
        stages = stages_of_one_block(small, carry)
        loss, gradients = _run(small, run_in_turn(stages, lambda model: model(**batch)).loss)
    except Exception as error:  # whatever a model raises whose blocks need more
        return first_line(error)
    without = next((name for name in whole[1] if name not in gradients), None)
    if without is not None:
        return f"{without} has no gradient"
    difference = largest_difference(whole[0], loss, whole[1].values(), [gradients[name] for name in whole[1]])
    # Written so that NaN is a problem.
    return None if difference <= _BOUND else f"the loss, or a gradient, differs by {difference:.0e}"


def _run(model: PreTrainedModel, loss: torch.Tensor) -> tuple[torch.Tensor, _Gradients]:
    """Give the loss, and the gradients of its backward."""
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients
