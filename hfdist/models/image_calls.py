"""Whether a model calls modules once for each image: ranks with other images would call them another number of times.

one image     tower  norm  projector
two images    tower  norm  projector  norm  projector       ZeRO-3 gathers weights in each call: ranks would part
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from hfdist.errors import first_line
from hfdist.models.image_text import make_small

logger = logging.getLogger(__name__)

Batch = Mapping[str, torch.Tensor]


def module_of_each_image(architecture: PreTrainedConfig, make_batches: Callable[[], Sequence[Batch]]) -> str | None:
    """Give the name of a module with weights that batches call another number of times; None: there is none.

    Args:
        architecture: of the model.
        make_batches: gives batches with labels, which have one image and more.

    Returns:
        None, too, where no small model of the type can be tried, which is told.
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
    called = dict.fromkeys(name for one in counts for name in one)
    return next((name for name in called if len({one[name] for one in counts}) > 1), None)


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
