"""FLOPs of an operation: torch's own table, and the formulas that it lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def find_formula(packet: object) -> Callable[..., int] | None:
    """Give the formula of an operation's packet, called with its arguments and `out_val`; None: it has no FLOPs."""
    return _FORMULAS.get(packet) or flop_registry.get(packet) or _FORMULAS_BY_NAME.get(str(packet))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_product_flops(left: torch.Tensor, right: torch.Tensor, *_: object, **__: object) -> int:
    """Groups of the right tensor share the rows of the left one, or the columns over which both are summed."""
    return int(2 * math.prod(left.shape) * right.shape[-1])


def _grouped_product_backward_flops(
    _gradient: object, left: torch.Tensor, right: torch.Tensor, *_: object, **__: object
) -> int:
    return 2 * _grouped_product_flops(left, right)


def _added_product_flops(_total: object, left: torch.Tensor, right: torch.Tensor, *_: object, **__: object) -> int:
    return int(2 * math.prod(left.shape) * right.shape[-1])


def _packed_layer_flops(inputs: torch.Tensor, _: object, shape: Sequence[int], *__: object, **___: object) -> int:
    return 2 * inputs.numel() * shape[0]


_FORMULAS: dict[object, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten._grouped_mm: _grouped_product_flops,
    _aten.addmm_: _added_product_flops,
}
"""FLOP formulas of operations that torch's own table lacks."""

_FORMULAS_BY_NAME: dict[str, Callable[..., int]] = {
    "transformers.grouped_mm_fallback": _grouped_product_flops,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward_flops,
    "bitsandbytes.gemm_4bit": _packed_layer_flops,
}
"""FLOP formulas of operations that exist only once a model has been imported, by name."""
