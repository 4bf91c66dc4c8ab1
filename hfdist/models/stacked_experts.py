"""Stacked experts of transformers, run with products of another kind: LoRA beside them, or weights of 4 bits.

y = x W_e' + scale * (x A_e') B_e'     for the rows x of each expert e
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear

_FACTORS = "hfdist_factors"
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


@contextmanager
def known_to(experts: nn.Module, name: str, factors: Factors) -> Iterator[None]:
    """Let a forward of these experts add what LoRA gives beside the stack `name`, in this context."""
    known: dict[str, Factors] = vars(experts).setdefault(_FACTORS, {})
    known[name] = factors
    try:
        yield
    finally:
        del known[name]


def has_factors(experts: nn.Module) -> bool:
    """Whether the forward that runs now has LoRA beside any stack."""
    return bool(vars(experts).get(_FACTORS))
