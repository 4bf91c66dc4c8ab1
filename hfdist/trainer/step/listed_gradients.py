"""`model.zero_grad()` from a list of parameters: once a step torch would walk all modules for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


@contextmanager
def zeroing_from_list(model: nn.Module, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Meanwhile, `model.zero_grad()` drops the gradients of `parameters`, which are all that the model has."""
    if type(model).zero_grad is not nn.Module.zero_grad or "zero_grad" in vars(model):
        # DeepSpeed's engine has more to do.
        yield
        return
    # Not a closure: a copy of the model gets a list of its own parameters.
    model.zero_grad = partial(_zero, list(parameters))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.zero_grad


def _zero(parameters: Sequence[torch.Tensor], set_to_none: bool = True) -> None:
    """Do what `nn.Module.zero_grad` does."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach_().zero_()
