"""Gumbel noise by a counter-based generator: a seed, a step and a token decide each number, on any device.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), in int64 arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_LOW = 0xFFFFFFFF

Words = tuple[torch.Tensor, ...]
"""32-bit words, each in an int64."""


def split_seeds(seeds: Sequence[int]) -> torch.Tensor:
    """Give the key of each seed, of which 64 bits count: int64 of shape [rows, 2]."""
    return torch.tensor([[seed & _LOW, seed >> 32 & _LOW] for seed in seeds], dtype=torch.long).reshape(-1, 2)


def philox(counter: Words, key: Words) -> Words:
    """Give 4 random words for a counter of 4 words and a key of 2 words; they are broadcast."""
    for _ in range(_NUM_ROUNDS):
        # A product beyond 63 bits wraps around, and its bits stay right.
        first, second = (multiplier * word for multiplier, word in zip(_MULTIPLIERS, counter[::2], strict=True))
        counter = (
            (second >> 32 & _LOW) ^ counter[1] ^ key[0],
            second & _LOW,
            (first >> 32 & _LOW) ^ counter[3] ^ key[1],
            first & _LOW,
        )
        key = tuple(word + step & _LOW for word, step in zip(key, _KEY_STEPS, strict=True))
    return counter


def gumbel_noise(keys: torch.Tensor, step: int, num_tokens: int) -> torch.Tensor:
    """Give independent standard Gumbel numbers.

    Args:
        keys: of `split_seeds`, [rows, 2].
        step: another one gives other numbers.
        num_tokens: numbers of each row; the first ones do not depend on how many there are.

    Returns:
        float64 of shape [rows, num_tokens].
    """
    blocks = torch.arange(-(-num_tokens // 4), device=keys.device).expand(len(keys), -1)
    zero = torch.zeros_like(blocks[:, :1])
    words = torch.stack(philox((blocks, zero + step, zero, zero), tuple(keys[:, :, None].unbind(1))), dim=-1)
    uniform = (words.flatten(1)[:, :num_tokens].double() + 0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()
