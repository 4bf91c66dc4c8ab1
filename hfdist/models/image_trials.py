"""Trials of a small model on rows with images: its positions, whether rows may be packed, and calls by image.

Each type is tried, so no list of types is needed.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import first_line
from hfdist.models.cache_use import without_cache
from hfdist.models.differences import largest_difference
from hfdist.models.image_text import make_small

logger = logging.getLogger(__name__)

Batch = Mapping[str, torch.Tensor]
_BOUND = 1e-5
"""Largest relative difference in float32; documents that see each other differ by 1e-2 and more."""
_IGNORED = -100


def find_positions(architecture: PreTrainedConfig) -> Callable[[Batch], torch.Tensor] | None:
    """Find how a type computes the positions of a document with images.

    Returns:
        A function that takes a batch of one document and gives its positions of time, height and width, shape
        [3, 1, tokens]. None: the type has positions of text only, or no small model can be made.
    """
    try:
        with torch.device("meta"):
            body = make_small(architecture).base_model
    except Exception:  # whatever a model raises that cannot be made small; `why_rows_mix` tells it
        return None
    find = getattr(body, "get_rope_index", None)
    if find is None:
        return None
    known_inputs = inspect.signature(find).parameters

    def positions(document: Batch) -> torch.Tensor:
        inputs = {name: values for name, values in document.items() if name in known_inputs}
        found: torch.Tensor
        # Further values are for tokens that are written after the document.
        found, *_ = find(**inputs)
        return found

    return positions


@unset_fake_temporarily()
def why_rows_mix(architecture: PreTrainedConfig, make_trial: Callable[[], tuple[Batch, Sequence[Batch]]]) -> str | None:
    """Say why packed rows with images are not computed as each by itself; None: loss and gradients are the same.

    Args:
        architecture: config of the model.
        make_trial: gives a batch of one packed sequence, and a batch for each of its documents, all with labels.
    """
    try:
        packed, alone = make_trial()
        small = make_small(architecture)
        # With a cache, transformers does not look for positions that restart.
        with without_cache(small.config):
            loss_alone, gradients_alone = _run(small, alone)
            loss_packed, gradients_packed = _run(small, [packed])
    except Exception as error:  # whatever a model raises on what it was not written for
        return f"a small model cannot be tried so: {first_line(error)}"
    difference = largest_difference(loss_alone, loss_packed, gradients_alone, gradients_packed)
    if difference <= _BOUND:
        return None
    # A difference that is not a number comes here, too.
    return f"a small {architecture.model_type} differs by {difference:.0e}"


def _run(model: PreTrainedModel, batches: Sequence[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Give the mean loss of the targets of all batches, and the gradient of each parameter."""
    model.zero_grad()
    counts = [int((batch["labels"][:, 1:] != _IGNORED).sum()) for batch in batches]
    total = torch.zeros(())
    for batch, count in zip(batches, counts, strict=True):
        loss = model(**batch).loss * (count / sum(counts))
        loss.backward()
        total += loss.detach()
    return total, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def module_of_each_image(architecture: PreTrainedConfig, make_batches: Callable[[], Sequence[Batch]]) -> str | None:
    """Find a module with weights that is called once for each image, and give its name.

        one image     tower  norm  projector
        two images    tower  norm  projector  norm  projector

    ZeRO-3 gathers weights in each call, so ranks with different numbers of images would wait for each other for ever.

    Args:
        architecture: config of the model.
        make_batches: gives batches with labels that have different numbers of images, at least one each.

    Returns:
        The first such module; None: there is none, or no small model of the type can be tried, which is logged.
    """
    try:
        small, batches = make_small(architecture), make_batches()
        counts = [_count_calls(small, batch) for batch in batches]
    except Exception as error:  # whatever a model raises that cannot be made small
        logger.warning(
            "images: whether each one calls a module is not known, and ranks under ZeRO-3 could wait for ever: %s",
            first_line(error),
        )
        return None
    for name in dict.fromkeys(name for calls in counts for name in calls):
        if len({calls[name] for calls in counts}) > 1:
            return name
    return None


def _count_calls(model: nn.Module, batch: Batch) -> Counter[str]:
    """Count the calls of each module that has weights of its own."""
    calls: Counter[str] = Counter()

    def count(name: str) -> Callable[..., None]:
        return lambda *_: calls.update([name])

    own = [(name, module) for name, module in model.named_modules() if next(module.parameters(False), None) is not None]
    hooks = [module.register_forward_pre_hook(count(name)) for name, module in own]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
