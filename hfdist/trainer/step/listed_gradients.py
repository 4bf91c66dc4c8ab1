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
    model.zero_grad = _ZeroGrad(model, list(parameters))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.zero_grad


class _ZeroGrad:
    """Does what `nn.Module.zero_grad` does."""

    def __init__(self, model: nn.Module, parameters: list[torch.Tensor]) -> None:
        self._model, self._parameters = model, parameters

    def __call__(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the model keeps this attribute for good, and may get other parameters.
        return partial, (nn.Module.zero_grad, self._model)
