"""Runs transformers' stacked experts by other matrix products: with LoRA beside them, in 4 bits, or in half precision.

    y = x W_e' + scale * (x A_e') B_e'      W_e: an expert's matrix in a stack, A_e and B_e: LoRA's factors beside it

The rows x are sorted by expert, so each expert has one block of rows, and one product serves a whole stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

NAME = "hfdist_products"
"""Name of this way to compute experts in transformers' registry."""
DEFAULT = "grouped_mm"
"""Name of the way that transformers takes by default."""
_FACTORS = "hfdist_factors"
"""Attribute of a module of experts: LoRA of the forward that runs now."""
_PRODUCT = "hfdist_product"
"""Attribute of a module of experts: the product that its stacks need."""
_REGISTRY_FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}
"""Attributes that transformers sets on modules whose experts its registry runs; others have a forward of their own."""
_ALIGNED_BYTES = 16
"""Strides in a grouped product must be a multiple of so many bytes."""


class _ViewOfCopy(NamedTuple):
    """A view of a stack that was copied to another type: it is made again from the stack."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Factors(NamedTuple):
    """LoRA's factors beside a stack of matrices."""

    inner: torch.Tensor
    """The factors A, [experts, rank, in]."""
    outer: torch.Tensor
    """The factors B, [experts, out, rank]."""
    scale: float
    """Factor of what LoRA adds."""


Multiply = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies rows by the matrices of their experts, and gives [pairs, out]; a pair is a token and one of its experts.

Takes the name of a stack, rows [pairs, in] sorted by expert, the expert of each row [pairs], and where the rows of each
expert end [experts].
"""


def run_experts(
    experts: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, multiply: Multiply
) -> torch.Tensor:
    """Run stacked experts of transformers, with products of another kind.

    Args:
        experts: a module whose class transformers' `use_experts_implementation` decorates.
        hidden: hidden states, [tokens, width].
        choices: the chosen experts of each token, [tokens, experts per token]; this rank has all of them.
        weights: the factors of these experts' outputs, of the same shape.
        multiply: multiplies rows by a stack, and adds its bias.

    Returns:
        Sum of the weighted outputs of each token's experts, [tokens, width].
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
    return rows.view(len(hidden), per_token, rows.shape[-1]).sum(1).to(hidden.dtype)


def multiply_stack(experts: Any, name: str, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a stack of the module, as transformers does; a `Multiply` once `experts` is given.

    Under autocast it computes in autocast's type, as a linear layer does, where the stack's sizes allow it.
    """
    stack = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias")[ids] if experts.has_bias else None
    kind = rows.device.type
    # autocast does not know grouped products.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else stack.dtype
    if dtype != stack.dtype and all(size * dtype.itemsize % _ALIGNED_BYTES == 0 for size in stack.shape[1:]):
        half, bias = stack.to(dtype), None if bias is None else bias.to(dtype)
        with nullcontext() if torch.compiler.is_compiling() else _keeping_source(stack, half):
            return _multiply(experts, half, rows, ends, bias)
    return _multiply(experts, stack, rows, ends, bias)


def _multiply(
    experts: Any, stack: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # transformers' private function knows which kernel runs on which device, in compiled code, too.
    product: torch.Tensor = _grouped_linear(rows, stack, ends, bias=bias, is_transposed=experts.is_transposed)
    return product


def _keeping_source(stack: torch.Tensor, copied: torch.Tensor) -> AbstractContextManager[None]:
    """Keep no copy of a stack for the backward, in this context: the backward copies the stack again.

    Experts are nearly all of a model's weights, so copies of them would be the largest part of its activations.
    """
    dtype, storage = copied.dtype, copied.untyped_storage()._cdata

    def pack(tensor: torch.Tensor) -> torch.Tensor | _ViewOfCopy:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        return _ViewOfCopy(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(kept: torch.Tensor | _ViewOfCopy) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        return stack.detach().to(dtype).as_strided(kept.size, kept.stride, kept.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def add_factors(product: torch.Tensor, rows: torch.Tensor, factors: Factors, ends: torch.Tensor) -> torch.Tensor:
    """Add what LoRA gives for the rows to their product with a stack, [pairs, out]; in place."""
    inner, outer = factors.inner.to(product.dtype), factors.outer.to(product.dtype)
    # Zeros make the rank a multiple of what the kernel takes.
    missing = -inner.shape[1] % (_ALIGNED_BYTES // inner.element_size())
    if missing:
        inner, outer = functional.pad(inner, (0, 0, 0, missing)), functional.pad(outer, (0, missing))
    narrow = _grouped_linear(rows, inner.contiguous(), ends) * factors.scale
    return product.add_(_grouped_linear(narrow, outer.contiguous(), ends))


def with_factors(experts: nn.Module, multiply: Multiply) -> Multiply:
    """Give a product that also adds the LoRA that `known_to` has noted beside the stacks of these experts."""
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


def is_stacked(module: nn.Module) -> bool:
    """Whether a module is one of stacked experts that transformers' registry can run."""
    return vars(module).keys() >= _REGISTRY_FLAGS


def set_product(experts: nn.Module, product: Callable[..., torch.Tensor]) -> None:
    """Let these experts multiply by another product: a `Multiply` once the module is given as its first argument."""
    vars(experts)[_PRODUCT] = product


def use_products(model: nn.Module) -> None:
    """Let stacked experts run by this file's products, in place, if they run in transformers' default way so far.

    Under autocast they compute in its type then. Without autocast, an adapter and packed weights nothing changes.
    """
    # PEFT's model holds that of transformers.
    base = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if base is None or not any(map(is_stacked, base.modules())):
        return
    if DEFAULT in base.get_experts_implementation().values():
        run_by_products(base)


def run_by_products(model: PreTrainedModel) -> bool:
    """Let the experts of a model run by this file's products, in place; say whether its class takes that."""
    model.set_experts_implementation(NAME)
    return NAME in model.get_experts_implementation().values()


def _run(experts: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Run a module of experts; models call it by transformers' registry."""
    product = vars(experts).get(_PRODUCT)
    if product is None and not vars(experts).get(_FACTORS) and not torch.is_autocast_enabled(hidden.device.type):
        # Nothing to add: no LoRA beside these experts, or another model of the same config.
        whole: torch.Tensor = ALL_EXPERTS_FUNCTIONS[DEFAULT](experts, hidden, choices, weights)
        return whole
    multiply = partial(multiply_stack if product is None else product, experts)
    return run_experts(experts, hidden, choices, weights, with_factors(experts, multiply))


# It is registered at the import: a process that is given a model's config may make a model of it before it calls
# anything else here.
ALL_EXPERTS_FUNCTIONS.register(NAME, _run)
