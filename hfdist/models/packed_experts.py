"""Stacks of experts in 4 bits: one expert is dequantized at a time, in the forward and again in the backward.

A stack is one parameter of bytes, uint8 of [experts, bytes], and keeps its name. A row is an expert:

    codes             second scales        offset     scales               filling
    4 bits a weight   float32 a 256 scales float32    8 bits a 64 weights  up to 16 bytes

    scale of a block = level of its 8 bits * second scale + offset

So experts do not depend on each other, scales are cut and sent as weights are, and a change of the model's type leaves
them alone.
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
    """How a packed stack is made and read: the shape of its matrices, and the types of its numbers."""

    shape: tuple[int, ...]
    """Number of experts, then rows and columns of each expert's matrix."""
    dtype: torch.dtype
    """The type of dequantized weights."""
    quantization: Quantization
    """The type of the codes of 4 bits."""
    levels: torch.Tensor
    """The 256 values that scales of 8 bits stand for, float32 of [256]: one tensor for all stacks."""

    @property
    def _num_blocks(self) -> int:
        """Blocks of weights of one expert; the last one may be filled up."""
        return -(-self.shape[1] * self.shape[2] // _BLOCK)

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Quantize weights of [experts, rows, columns]; give uint8 of [experts, bytes]."""
        experts_at_once = max(1, _AT_ONCE // weights[0].numel())
        parts = weights.flatten(1).split(experts_at_once)
        return torch.cat([self._pack(part) for part in parts])

    def _pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Quantize some experts, [experts, weights]; give uint8 of [experts, bytes], laid out as the module says."""
        library, num_experts, blocks = _library(), len(weights), self._num_blocks
        padded = functional.pad(weights, (0, blocks * _BLOCK - weights.shape[1]))
        codes, state = library.quantize_4bit(padded, blocksize=_BLOCK, quant_type=self.quantization.value)
        scales = state.absmax.view(num_experts, blocks)
        offsets = scales.mean(1, keepdim=True)
        centred = functional.pad(scales - offsets, (0, -blocks % _GROUP))
        scale_codes, second = library.quantize_blockwise(centred, code=self.levels, blocksize=_GROUP)
        floats = torch.cat([second.absmax.view(num_experts, -1), offsets], 1).view(torch.uint8)
        rows = torch.cat([codes.view(num_experts, -1), floats, scale_codes.view(num_experts, -1)[:, :blocks]], 1)
        return functional.pad(rows, (0, -rows.shape[1] % _ALIGNED))

    def open(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split packed bytes into codes, uint8 of [experts, bytes], and scales of blocks, float32 of [experts, blocks].

        Args:
            packed: the result of `pack`, or its bytes as another type, in any shape, perhaps with more bytes at the
                end. It may hold some of the experts only, as on expert ranks.
        """
        blocks = self._num_blocks
        num_groups = -(-blocks // _GROUP)
        codes_end = blocks * _BLOCK_BYTES
        floats_end = codes_end + (num_groups + 1) * torch.float32.itemsize
        scales_end = floats_end + blocks
        row_bytes = scales_end + -scales_end % _ALIGNED
        flat = packed.detach().view(torch.uint8).flatten()
        rows = flat[: len(flat) // row_bytes * row_bytes].view(-1, row_bytes)
        floats, scale_codes = rows[:, codes_end:floats_end].view(torch.float32), rows[:, floats_end:scales_end]
        if self.levels.device != rows.device:
            self.levels = self.levels.to(rows.device)
        second = floats[:, :-1].repeat_interleave(_GROUP, 1)[:, :blocks]
        offsets = floats[:, -1:]
        return rows[:, :codes_end], self.levels[scale_codes.int()] * second + offsets

    def multiply(
        self, rows: torch.Tensor, ends: torch.Tensor, packed: torch.Tensor, *, transposes: bool
    ) -> torch.Tensor:
        """Multiply rows by the matrices of their experts.

        Args:
            rows: shape [tokens, in], sorted by expert.
            ends: where the rows of each expert end, [experts].
            packed: the bytes of the stack, as `open` takes them.
            transposes: whether a row is multiplied by the transposed matrix.

        Returns:
            Products [tokens, out].
        """
        codes, scales = self.open(packed)
        output: torch.Tensor = _times_packed(
            rows, ends, codes, scales, self.shape[1:], self.dtype, self.quantization.value, transposes
        )
        return output


def make_levels() -> torch.Tensor:
    """Make the table of the values that scales of 8 bits stand for, [256], as bitsandbytes has it."""
    # bitsandbytes gives the table only with what it quantizes.
    _, state = _library().quantize_blockwise(torch.zeros(1))
    levels: torch.Tensor = state.code
    return levels


def _library() -> Any:
    """Import the functions of bitsandbytes: an optional package, slow to import, and without types."""
    return importlib.import_module("bitsandbytes").functional


def dequantize_expert(
    codes: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str
) -> torch.Tensor:
    """Give the matrix of one expert.

    Args:
        codes: the expert's row of codes, uint8 of [bytes], from `PackedStack.open`.
        scales: the expert's row of scales, float32 of [blocks], from `PackedStack.open`.
        shape: rows and columns of the matrix.
        dtype: type of the matrix.
        kind: bitsandbytes' name of the type of 4 bits.
    """
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
        ends: [experts], where the rows of each expert end; rows after the last end give zeros.
        codes: [experts, bytes], from `PackedStack.open`.
        scales: [experts, blocks], from `PackedStack.open`.
        shape: rows and columns of a matrix.
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
def _shape_of_product(
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
    """Rows times the matrices of their experts. Autograd keeps the packed stack only, and no matrix."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ends: torch.Tensor, packed: torch.Tensor, stack: PackedStack, transposes: bool
    ) -> torch.Tensor:
        # Not by `save_for_backward`: hooks on saved tensors would copy them, and where ranks share weights, the memory
        # of `packed` is freed, and gathered again before the backward.
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
    if experts.has_bias:
        output = output + getattr(experts, f"{name}_bias")[ids].to(output.dtype)
    return output


# Compiled blocks break here: kernels of bitsandbytes are not compiled.
_uncompiled: Callable[..., torch.Tensor] = torch.compiler.disable(_multiply)


def find_stacks(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Give the frozen stacks of a module of experts, by name.

    Returns:
        Empty: it is no module of experts, one that computes in its own way, or one of which a stack is trained.
    """
    if not is_stacked(experts):
        return {}
    parameters = {name: experts._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj")}
    stacks = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    return {} if any(parameter.requires_grad for parameter in stacks.values()) else stacks


def pack_experts(
    experts: Any, stacks: dict[str, nn.Parameter], quantization: Quantization, levels: torch.Tensor
) -> None:
    """Put packed bytes in the place of the whole stacks of a module of experts, in place.

    Args:
        experts: the module; `run_by_products` has been called for its model.
        stacks: its whole stacks by name, as `find_stacks` gives them.
        quantization: the type of 4 bits.
        levels: the table of `make_levels`: one tensor for all stacks of a model.
    """
    packed_stacks = {}
    for name, weights in stacks.items():
        stack = PackedStack(tuple(weights.shape), weights.dtype, quantization, levels)
        setattr(experts, name, nn.Parameter(stack.pack(weights.data), requires_grad=False))
        packed_stacks[name] = stack
    experts.packed_stacks = packed_stacks
    set_product(experts, _uncompiled)


def list_packed(experts: nn.Module) -> dict[str, PackedStack]:
    """Give the packed stacks of a module by the names of their parameters; empty: it has none."""
    stacks: dict[str, PackedStack] = getattr(experts, "packed_stacks", {})
    return stacks
