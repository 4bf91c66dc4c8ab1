"""Stacks of experts in 4 bits: one expert is dequantized at a time, in the forward and again in the backward.

A stack is one parameter of bytes, and keeps its name. A row is an expert: its codes of 4 bits, then what its scales are
scaled with, then a scale of 8 bits for each block of 64 weights. So experts do not depend on each other, scales are
cut and sent as weights are, and a change of the model's type leaves them alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from hfdist.config.model import Quantization
from hfdist.models.stacked_experts import is_stacked, set_product

_BLOCK = 64
"""Weights that have a scale together, as bitsandbytes has it."""
_GROUP = 256
"""Scales that have a scale together, as bitsandbytes has it."""
_BLOCK_BYTES = _BLOCK // 2
"""Bytes of the codes of a block."""
_ALIGNED = 16
"""Rows begin at multiples of these bytes, as kernels load, and floats must."""
_AT_ONCE = 2**24
"""Weights that are quantized in one call: bitsandbytes counts in int32, and takes many times their bytes meanwhile."""


@dataclass
class PackedStack:
    """How the bytes of a packed stack are read, and what its matrices are."""

    shape: tuple[int, ...]
    """Experts, and the two sides of each one's matrix."""
    dtype: torch.dtype
    """The type of dequantized weights."""
    quantization: Quantization
    levels: torch.Tensor
    """[256], what scales of 8 bits stand for: one tensor for all stacks."""

    @property
    def _num_blocks(self) -> int:
        return -(-self.shape[1] * self.shape[2] // _BLOCK)

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Quantize weights of [experts, rows, columns]; give uint8 of [experts, bytes]."""
        parts = weights.flatten(1).split(max(1, _AT_ONCE // weights[0].numel()))
        return torch.cat([self._pack(part) for part in parts])

    def _pack(self, weights: torch.Tensor) -> torch.Tensor:
        library, num_experts, blocks = _library(), len(weights), self._num_blocks
        padded = functional.pad(weights, (0, blocks * _BLOCK - weights.shape[1]))
        codes, state = library.quantize_4bit(padded, blocksize=_BLOCK, quant_type=self.quantization.value)
        scales = state.absmax.view(num_experts, blocks)
        offsets = scales.mean(1, keepdim=True)
        centred = functional.pad(scales - offsets, (0, -blocks % _GROUP))
        small, second = library.quantize_blockwise(centred, code=self.levels, blocksize=_GROUP)
        floats = torch.cat([second.absmax.view(num_experts, -1), offsets], 1).view(torch.uint8)
        row = torch.cat([codes.view(num_experts, -1), floats, small.view(num_experts, -1)[:, :blocks]], 1)
        return functional.pad(row, (0, -row.shape[1] % _ALIGNED))

    def open(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give codes and scales: uint8 of [experts, bytes] and float32 of [experts, blocks].

        Args:
            packed: what `pack` gave, or its bytes as another type, in any shape, perhaps with more bytes at the end.
        """
        blocks = self._num_blocks
        begin, end = blocks * _BLOCK_BYTES, blocks * _BLOCK_BYTES + (-(-blocks // _GROUP) + 1) * torch.float32.itemsize
        size = end + blocks + -(end + blocks) % _ALIGNED
        flat = packed.detach().view(torch.uint8).flatten()
        # Expert ranks hold some of the experts.
        rows = flat[: len(flat) // size * size].view(-1, size)
        floats, small = rows[:, begin:end].view(torch.float32), rows[:, end : end + blocks]
        if self.levels.device != rows.device:
            self.levels = self.levels.to(rows.device)
        second = floats[:, :-1].repeat_interleave(_GROUP, 1)[:, :blocks]
        return rows[:, :begin], self.levels[small.int()] * second + floats[:, -1:]

    def multiply(
        self, rows: torch.Tensor, ends: torch.Tensor, packed: torch.Tensor, *, transposes: bool
    ) -> torch.Tensor:
        """Multiply rows [tokens, in], sorted by expert, by the matrices of their experts; give [tokens, out].

        `ends`: where the rows of each expert end, [experts].
        """
        codes, scales = self.open(packed)
        output: torch.Tensor = _times_packed(
            rows, ends, codes, scales, self.shape[1:], self.dtype, self.quantization.value, transposes
        )
        return output


def make_levels() -> torch.Tensor:
    """Make the table of what scales of 8 bits stand for, [256]: bitsandbytes computes it once, and gives copies."""
    _, state = _library().quantize_blockwise(torch.zeros(1))
    levels: torch.Tensor = state.code
    return levels


def _library() -> Any:
    # Optional, and slow to import. It says nothing of its types.
    return importlib.import_module("bitsandbytes").functional


def dequantize_expert(
    codes: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str
) -> torch.Tensor:
    """Give the matrix of one expert, from its codes and scales of `PackedStack.open`."""
    library = _library()
    state = library.QuantState(scales, shape=torch.Size(shape), dtype=dtype, blocksize=_BLOCK, quant_type=kind)
    matrix: torch.Tensor = library.dequantize_4bit(codes[: -(-shape[0] * shape[1] // 2)], state)
    return matrix


# One operation for all experts: a trace of a plan sees none of their matrices, and knows no number of tokens.
@torch.library.custom_op("hfdist::times_packed", mutates_args=())
def _times_packed(
    rows: torch.Tensor,
    ends: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    kind: str,
    transposes: bool,
) -> torch.Tensor:
    """Multiply rows by the matrices of their experts.

    Args:
        rows: [tokens, in], sorted by expert.
        ends: [experts], where those of each expert end; what follows them gives zeros.
        codes: [experts, bytes], from `PackedStack.open`.
        scales: [experts, blocks], from there, too.
        shape: shape of a matrix.
        dtype: type in which a matrix is dequantized.
        kind: bitsandbytes' name of the type of 4 bits.
        transposes: whether matrices are transposed.

    Returns:
        [tokens, out].
    """
    output, begin = rows.new_zeros(len(rows), shape[0 if transposes else 1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            matrix = dequantize_expert(codes[expert], scales[expert], shape, dtype, kind).to(rows.dtype)
            torch.mm(rows[begin:end], matrix.T if transposes else matrix, out=output[begin:end])
        begin = end
    return output


@_times_packed.register_fake
def _(
    rows: torch.Tensor,
    ends: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    kind: str,
    transposes: bool,
) -> torch.Tensor:
    return rows.new_empty(len(rows), shape[0 if transposes else 1])


@register_flop_formula(torch.ops.hfdist.times_packed)
def _count_flops(
    rows: Sequence[int], ends: object, codes: object, scales: object, shape: Sequence[int], *_: object, **__: object
) -> int:
    return 2 * rows[0] * shape[0] * shape[1]


class _Product(torch.autograd.Function):
    """Rows times the matrices of their experts, of which autograd keeps the packed ones alone."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ends: torch.Tensor, packed: torch.Tensor, stack: PackedStack, transposes: bool
    ) -> torch.Tensor:
        # They are no saved tensors of the graph: hooks would copy these, and ranks that share weights move memory.
        ctx.others = ends, packed, stack, transposes
        return stack.multiply(rows, ends, packed, transposes=transposes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ends, packed, stack, transposes = ctx.others
        return stack.multiply(gradients[0], ends, packed, transposes=not transposes), None, None, None, None


def _multiply(experts: Any, name: str, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows by the packed stack `name` of the module; a `Multiply` once `experts` is given."""
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    packed, stack = getattr(experts, name), experts.packed_stacks[name]
    output: torch.Tensor = _Product.apply(rows, ends, packed, stack, not experts.is_transposed)
    return output + getattr(experts, f"{name}_bias")[ids].to(output.dtype) if experts.has_bias else output


# Compiled blocks break here: kernels of bitsandbytes are not compiled.
_uncompiled: Callable[..., torch.Tensor] = torch.compiler.disable(_multiply)


def find_stacks(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Give the frozen stacks of a module of experts by name; empty: it is none, or computes in its own way."""
    if not is_stacked(experts):
        return {}
    stacks = {
        name: p for name in ("gate_up_proj", "up_proj", "down_proj") if (p := experts._parameters.get(name)) is not None
    }
    return {} if any(parameter.requires_grad for parameter in stacks.values()) else stacks


def pack_experts(
    experts: Any, stacks: dict[str, nn.Parameter], quantization: Quantization, levels: torch.Tensor
) -> None:
    """Put bytes in the place of the whole stacks of a module of experts, in place; the model must run by products.

    Args:
        experts: the module.
        stacks: what `find_stacks` gave, whole.
        quantization: the type of 4 bits.
        levels: what `make_levels` gave: one tensor for all stacks of a model.
    """
    packed_stacks = {}
    for name, weights in stacks.items():
        stack = PackedStack(tuple(weights.shape), weights.dtype, quantization, levels)
        setattr(experts, name, nn.Parameter(stack.pack(weights.data), requires_grad=False))
        packed_stacks[name] = stack
    experts.packed_stacks = packed_stacks
    set_product(experts, _uncompiled)


def list_packed(experts: nn.Module) -> dict[str, PackedStack]:
    """Give what the packed parameters of a module stand for, by name."""
    stacks: dict[str, PackedStack] = getattr(experts, "packed_stacks", {})
    return stacks
