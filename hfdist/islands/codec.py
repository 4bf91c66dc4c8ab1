"""How float32 numbers travel between islands: as they are, or rounded to bfloat16, to int8, or to 4 bits.

int8 and fp4 keep one float32 scale for each block of numbers. fp4 has a sign and three bits of exponent (E3M0), as in
Streaming DiLoCo (arXiv:2501.18512).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hfdist.config.islands import SCALED_NUMBERS, Codec

_FP4_SIZES = torch.tensor([0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])
"""Sizes of an fp4 number, as shares of its block's scale: three bits are the index of one of them."""
_FP4_SIGN = 8
"""The fourth bit of an fp4 number: set if the number is negative."""
_MIDDLES = (_FP4_SIZES[1:] + _FP4_SIZES[:-1]) / 2


def encode(codec: Codec, values: torch.Tensor) -> bytes:
    """Round numbers as the codec does, and give their bytes.

        fp32, bf16   number | number | ...
        int8         scale of each block | a byte for each number
        fp4          scale of each block | a byte for two numbers, of which the first has the low four bits

    Args:
        codec: how to round.
        values: finite float32 numbers on the CPU, of shape [n].
    """
    match codec:
        case Codec.fp32:
            return values.numpy().tobytes()
        case Codec.bf16:
            return values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        case Codec.int8:
            blocks, scales = _scaled(values)
            rounded = (blocks * 127).round_().to(torch.int8).view(-1)[: len(values)]
            return scales.numpy().tobytes() + rounded.numpy().tobytes()
        case Codec.fp4:
            blocks, scales = _scaled(values)
            # The nearest size has as many middles below the number as sizes.
            nearest = torch.bucketize(blocks.abs(), _MIDDLES, right=True)
            codes = torch.where(blocks < 0, nearest + _FP4_SIGN, nearest).to(torch.uint8).view(-1)
            num_pairs = math.ceil(len(values) / 2)
            low, high = codes[: 2 * num_pairs].view(-1, 2).unbind(1)
            return scales.numpy().tobytes() + (low + 16 * high).numpy().tobytes()


def decode(codec: Codec, content: bytes, num_elements: int) -> torch.Tensor:
    """Give the rounded numbers that `encode` has written.

    Args:
        codec: the codec that `encode` was called with.
        content: the bytes that it has given.
        num_elements: how many numbers they are.

    Returns:
        Float32 numbers on the CPU, of shape [num_elements].

    Raises:
        ValueError: the bytes are not of so many numbers.
    """
    if len(content) != codec.num_bytes(num_elements):
        raise ValueError(f"{len(content)} bytes are not {num_elements} numbers as {codec.value}")
    match codec:
        case Codec.fp32:
            return torch.from_numpy(np.frombuffer(content, np.float32).copy())
        case Codec.bf16:
            return torch.from_numpy(np.frombuffer(content, np.int16).copy()).view(torch.bfloat16).float()
    num_blocks = math.ceil(num_elements / SCALED_NUMBERS)
    scales = torch.from_numpy(np.frombuffer(content, np.float32, num_blocks).copy())
    codes_start = scales.nbytes
    if codec is Codec.int8:
        numbers = torch.from_numpy(np.frombuffer(content, np.int8, offset=codes_start).copy()).float() / 127
    else:
        pairs = torch.from_numpy(np.frombuffer(content, np.uint8, offset=codes_start).copy())
        codes = torch.stack([pairs % 16, pairs // 16], 1).view(-1)[:num_elements]
        sizes = _FP4_SIZES[(codes % _FP4_SIGN).long()]
        numbers = torch.where(codes < _FP4_SIGN, sizes, -sizes)
    return numbers * scales.repeat_interleave(SCALED_NUMBERS)[:num_elements]


def _scaled(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give numbers from -1 to 1, of shape [blocks, SCALED_NUMBERS], and the scale of each block, of shape [blocks].

    The last block is filled up with zeros. A scale is the largest absolute value of its block.
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % SCALED_NUMBERS)).view(-1, SCALED_NUMBERS)
    scales = blocks.abs().amax(1)
    # A block of zeros stays zeros.
    divisors = scales.clamp_min(torch.finfo(torch.float32).tiny)
    return blocks / divisors[:, None], scales
