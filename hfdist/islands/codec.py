"""How float32 numbers travel between islands: as they are, or rounded to bfloat16, to int8, or to 4 bits.

int8 and fp4 keep one float32 scale for each block of numbers. fp4 has a sign and three bits of exponent (E3M0), as in
Streaming DiLoCo (arXiv:2501.18512).
"""

from __future__ import annotations

import numpy as np
import torch

from hfdist.config.islands import SCALED_NUMBERS, Codec

_EXPONENTS = 7
"""Sizes of fp4 besides 0: the scale, its half, its quarter, and so on."""
_SIZES = torch.tensor([0.0, *(2.0**-power for power in reversed(range(_EXPONENTS)))])
_MIDDLES = (_SIZES[1:] + _SIZES[:-1]) / 2


def encode(codec: Codec, values: torch.Tensor) -> bytes:
    """Give finite float32 numbers of the CPU, of shape [n], as bytes."""
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
            # 0 to 7: the number of middles below it.
            sizes = torch.bucketize(blocks.abs(), _MIDDLES, right=True).to(torch.uint8)
            codes = (sizes + 8 * (blocks < 0).to(torch.uint8)).view(-1)
            pairs = codes[: -(-len(values) // 2) * 2].view(-1, 2)
            return scales.numpy().tobytes() + (pairs[:, 0] + 16 * pairs[:, 1]).numpy().tobytes()


def decode(codec: Codec, content: bytes, num_elements: int) -> torch.Tensor:
    """Give the numbers that `encode` was given, rounded, as float32 of shape [n].

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
    num_blocks = -(-num_elements // SCALED_NUMBERS)
    scales = torch.from_numpy(np.frombuffer(content, np.float32, num_blocks).copy())
    if codec is Codec.int8:
        numbers = torch.from_numpy(np.frombuffer(content, np.int8, offset=4 * num_blocks).copy()).float() / 127
    else:
        pairs = torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 * num_blocks).copy())
        codes = torch.stack([pairs % 16, pairs // 16], 1).view(-1)[:num_elements]
        numbers = _SIZES[(codes % 8).long()] * torch.where(codes < 8, 1.0, -1.0)
    return numbers * scales.repeat_interleave(SCALED_NUMBERS)[:num_elements]


def _scaled(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give blocks of numbers between -1 and 1, filled up with zeros, and their scales."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % SCALED_NUMBERS)).view(-1, SCALED_NUMBERS)
    scales = blocks.abs().amax(1)
    return blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None], scales
