"""LoRA of stacked experts by its factors: two narrow grouped products, in place of PEFT's sum of each whole stack.

    y = x W_e' + scale * (x A_e') B_e'     for the rows x of each expert e

PEFT adds B A to all matrices of a stack in each forward, and its backward makes the gradient of the whole stack. The
layers stay PEFT's own: their weights, names, merging and files do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

NAME = "factored_lora"
"""Among transformers' implementations of experts."""

_DEFAULT, _FACTORS = "grouped_mm", "hfdist_factors"
_ALIGNED_BYTES = 16
"""What the strides of a grouped product must be a multiple of."""


class Factors(NamedTuple):
    """LoRA beside a stack of matrices."""

    inner: torch.Tensor
    """A, [experts, rank, in]."""
    outer: torch.Tensor
    """B, [experts, out, rank]."""
    scale: float


Multiply = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(name of a stack, rows [pairs, in] sorted by expert, expert of each row [pairs], end of each expert's rows [experts])
-> [pairs, out]."""


def run_experts(
    experts: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, multiply: Multiply
) -> torch.Tensor:
    """Run stacked experts of transformers, with products of another kind.

    Args:
        experts: a module that `use_experts_implementation` decorates.
        hidden: [tokens, width].
        choices: the chosen experts of each token, [tokens, experts per token].
        weights: of what they give, likewise.
        multiply: the product of rows and a stack, with its bias.

    Returns:
        [tokens, width].
    """
    per_token = choices.shape[-1]
    ids, order = choices.flatten().sort()
    numbers = torch.arange(experts.num_experts, device=ids.device)
    ends = torch.searchsorted(ids, numbers, right=True).to(torch.int32)
    rows = multiply("gate_up_proj" if experts.has_gate else "up_proj", hidden[order // per_token], ids, ends)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = multiply("down_proj", rows, ids, ends)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    rows = (rows * weights.flatten()[order, None])[order.argsort()]
    return rows.view(len(hidden), per_token, -1).sum(1).to(hidden.dtype)


def multiply_stack(experts: Any, name: str, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply by a stack of the module, as transformers does; a `Multiply` once `experts` is given."""
    bias = getattr(experts, f"{name}_bias")[ids] if experts.has_bias else None
    # Private: it knows where which kernel runs, compiled too.
    product: torch.Tensor = _grouped_linear(
        rows, getattr(experts, name), ends, bias=bias, is_transposed=experts.is_transposed
    )
    return product


def add_factors(product: torch.Tensor, rows: torch.Tensor, factors: Factors, ends: torch.Tensor) -> torch.Tensor:
    """Add what LoRA gives for the rows to their product with a stack, [pairs, out]; in place."""
    inner, outer = factors.inner.to(product.dtype), factors.outer.to(product.dtype)
    missing = -inner.shape[1] % (_ALIGNED_BYTES // inner.element_size())
    if missing:
        inner, outer = functional.pad(inner, (0, 0, 0, missing)), functional.pad(outer, (0, missing))
    narrow = _grouped_linear(rows, inner.contiguous(), ends) * factors.scale
    return product.add_(_grouped_linear(narrow, outer.contiguous(), ends))


def with_factors(experts: nn.Module, multiply: Multiply) -> Multiply:
    """Give a product that adds what LoRA gives beside the stacks of these experts, for the forward that runs now."""
    known: dict[str, Factors] = vars(experts).get(_FACTORS, {})

    def add(name: str, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = multiply(name, rows, ids, ends)
        return add_factors(product, rows, known[name], ends) if name in known else product

    return add


def use_factors(model: PreTrainedModel) -> None:
    """Let LoRA of stacked experts and of single matrices compute by factors, wherever PEFT would add up weights.

    In place; a model without such layers stays as it is, and so do experts that run by another implementation than
    transformers' default, and routers, which are small.

    Args:
        model: with its adapter, whole or a stage of it.
    """
    stacks = [m for m in model.modules() if isinstance(m, ParamWrapper) and _is_stacked(m.get_base_layer())]
    layers = [m for m in model.modules() if isinstance(m, ParamWrapper) and type(m.get_base_layer()) is nn.Linear]
    for layer in layers:
        # A class of the same state: PEFT goes on to know it for its own.
        layer.__class__ = _FactoredLinear
    if stacks and _DEFAULT in model.get_experts_implementation().values():
        for stack in stacks:
            stack.__class__ = _FactoredStack
        ALL_EXPERTS_FUNCTIONS.register(NAME, _run)
        model.set_experts_implementation(NAME)


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
        with _known_to(self.get_base_layer(), self.parameter_name, factors):
            return self.base_layer(x, *args, **kwargs)


class _FactoredLinear(_Factored):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        factors = self._factors()
        if factors is None:
            return super().forward(x, *args, **kwargs)
        product = self.base_layer(x, *args, **kwargs)
        narrow = functional.linear(x.to(factors.inner.dtype), factors.inner[0])
        return product + (factors.scale * functional.linear(narrow, factors.outer[0])).to(product.dtype)


@contextmanager
def _known_to(experts: nn.Module, name: str, factors: Factors) -> Iterator[None]:
    known: dict[str, Factors] = vars(experts).setdefault(_FACTORS, {})
    known[name] = factors
    try:
        yield
    finally:
        del known[name]


def _run(experts: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if not vars(experts).get(_FACTORS):
        whole: torch.Tensor = ALL_EXPERTS_FUNCTIONS[_DEFAULT](experts, hidden, choices, weights)
        return whole
    return run_experts(experts, hidden, choices, weights, with_factors(experts, partial(multiply_stack, experts)))
