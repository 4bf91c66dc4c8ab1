"""Lets PEFT's LoRA layers compute by their factors, with less memory: of experts, single matrices and linear layers.

    PEFT, beside a stack W      y = x (W + scale B A)'            B A and its gradient are as large as the stack
    here                        y = x W' + scale (x A') B'        two narrow products more

Of a linear layer, PEFT makes one more tensor as large as its output, to scale it. The layers stay PEFT's own: their
weights, names, merging and files do not change.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hfdist.models.stacked_experts import NAME, Factors, is_stacked, known_to, use_products


def use_factors(model: PreTrainedModel) -> None:
    """Let LoRA of stacked experts and of single matrices compute by factors, and that of linear layers make less.

    In place; a model without such layers stays as it is, and so do experts that run by another implementation than
    transformers' default or ours, and routers, which are small.

    Args:
        model: a model with its adapter, whole or a stage of one.
    """
    for layer in model.modules():
        # The class is changed in place, and not the layer: PEFT and saved names still find its own layer there. The new
        # classes are subclasses without attributes of their own.
        if type(layer) is Linear:
            layer.__class__ = _AddingLinear
        if not isinstance(layer, ParamWrapper):
            continue
        if type(layer.get_base_layer()) is nn.Linear:
            layer.__class__ = _FactoredLinear
        elif is_stacked(layer.get_base_layer()):
            layer.__class__ = _FactoredStack
    use_products(model)


class _Factored(ParamWrapper):
    """PEFT's layer for single parameters, without the sum of the weight and its change."""

    def _factors(self) -> Factors | None:
        """Give the factors of the one active adapter; None: none is active, several are, or one is merged already."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or len(names) != 1:
            return None
        # PEFT numbers the columns of B by rank, then by expert.
        inner, outer = (cast(nn.Linear, layers[names[0]]).weight for layers in (self.lora_A, self.lora_B))
        inner = inner.view(self.num_experts, -1, inner.shape[1])
        outer = outer.view(len(outer), -1, self.num_experts).permute(2, 0, 1)
        return Factors(inner, outer, self.scaling[names[0]])

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        factors = self._factors()
        return super().forward(x, *args, **kwargs) if factors is None else self._add(factors, x, *args, **kwargs)

    def _add(self, factors: Factors, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layer, and add what LoRA gives."""
        raise NotImplementedError


class _FactoredStack(_Factored):
    """LoRA beside a stack of experts: the module of experts adds it in its own products."""

    def _factors(self) -> Factors | None:
        # A way to compute experts other than this package's products would leave LoRA out.
        experts: Any = self.get_base_layer()
        return super()._factors() if experts.config._experts_implementation == NAME else None

    def _add(self, factors: Factors, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with known_to(self.get_base_layer(), self.parameter_name, factors):
            return self.base_layer(x, *args, **kwargs)


class _FactoredLinear(_Factored):
    """LoRA beside the weight of a linear layer that has been named as a parameter."""

    def _add(self, factors: Factors, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        product = self.base_layer(x, *args, **kwargs)
        narrow = functional.linear(x.to(factors.inner.dtype), factors.inner[0])
        added = functional.linear(narrow, factors.outer[0]).to(product.dtype)
        return torch.add(product, added, alpha=factors.scale)


class _AddingLinear(Linear):
    """PEFT's linear layer, which scales LoRA's output while it adds it."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = [name for name in self.active_adapters if name in self.lora_A]
        is_plain = len(names) == 1 and names[0] not in self.lora_variant and not (args or kwargs)
        if not is_plain or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        (name,) = names
        product = self.base_layer(x)
        inner = cast(nn.Linear, self.lora_A[name])
        narrow = inner(self.lora_dropout[name](self._cast_input_dtype(x, inner.weight.dtype)))
        return torch.add(product, self.lora_B[name](narrow), alpha=self.scaling[name]).to(product.dtype)
