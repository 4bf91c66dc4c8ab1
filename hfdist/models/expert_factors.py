"""LoRA of stacked experts by its factors: two narrow grouped products, in place of PEFT's sum of each whole stack.

PEFT adds B A to all matrices of a stack in each forward, and its backward makes the gradient of the whole stack. The
layers stay PEFT's own: their weights, names, merging and files do not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hfdist.models.stacked_experts import Factors, has_factors, known_to, multiply_stack, run_experts, with_factors

NAME = "factored_lora"
"""Among transformers' implementations of experts."""

_DEFAULT = "grouped_mm"


def use_factors(model: PreTrainedModel) -> None:
    """Let LoRA of stacked experts and of single matrices compute by factors, wherever PEFT would add up weights.

    In place; a model without such layers stays as it is, and so do experts that run by another implementation than
    transformers' default, and routers, which are small.

    Args:
        model: with its adapter, whole or a stage of it.
    """
    for layer in model.modules():
        if isinstance(layer, ParamWrapper) and type(layer.get_base_layer()) is nn.Linear:
            # A class of the same state: PEFT goes on to know it for its own.
            layer.__class__ = _FactoredLinear
    if _DEFAULT in model.get_experts_implementation().values() and factor_stacks(model):
        ALL_EXPERTS_FUNCTIONS.register(NAME, _run)
        model.set_experts_implementation(NAME)


def factor_stacks(model: nn.Module) -> bool:
    """Let LoRA of stacks give the experts its factors, in place; say whether there is any.

    The experts must run by `with_factors`: they would leave LoRA out.
    """
    stacks = [m for m in model.modules() if isinstance(m, ParamWrapper) and _is_stacked(m.get_base_layer())]
    for stack in stacks:
        stack.__class__ = _FactoredStack
    return bool(stacks)


def _is_stacked(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


class _Factored(ParamWrapper):
    """PEFT's layer, without the sum of the weight and its change."""

    def _factors(self) -> Factors | None:
        """Give the factors of the one active adapter; None: none is, or it is merged already, or there are several."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or len(names) != 1:
            return None
        # PEFT numbers the columns of B by rank, then by expert.
        inner, outer = (cast(nn.Linear, layers[names[0]]).weight for layers in (self.lora_A, self.lora_B))
        inner = inner.view(self.num_experts, -1, inner.shape[1])
        outer = outer.view(len(outer), -1, self.num_experts).permute(2, 0, 1)
        return Factors(inner, outer, self.scaling[names[0]])


class _FactoredStack(_Factored):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        factors = self._factors()
        if factors is None:
            return super().forward(x, *args, **kwargs)
        with known_to(self.get_base_layer(), self.parameter_name, factors):
            return self.base_layer(x, *args, **kwargs)


class _FactoredLinear(_Factored):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        factors = self._factors()
        if factors is None:
            return super().forward(x, *args, **kwargs)
        product = self.base_layer(x, *args, **kwargs)
        narrow = functional.linear(x.to(factors.inner.dtype), factors.inner[0])
        return product + (factors.scale * functional.linear(narrow, factors.outer[0])).to(product.dtype)


def _run(experts: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if not has_factors(experts):
        whole: torch.Tensor = ALL_EXPERTS_FUNCTIONS[_DEFAULT](experts, hidden, choices, weights)
        return whole
    return run_experts(experts, hidden, choices, weights, with_factors(experts, partial(multiply_stack, experts)))
