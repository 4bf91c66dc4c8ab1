"""Gumbel noise by a counter-based generator: a seed, a step and a token decide each number, on any device.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), in int64 arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_LOW = 0xFFFFFFFF
"""The lower 32 bits."""


def split_seeds(seeds: Sequence[int]) -> torch.Tensor:
    """Give the key of each seed, of which 64 bits count: int64 of shape [rows, 2]."""
    return torch.tensor([[seed & _LOW, seed >> 32 & _LOW] for seed in seeds], dtype=torch.long).reshape(-1, 2)


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, ...]:
    # Once: a copy to a GPU waits for what the GPU does.
    return tuple(torch.tensor(words, device=device)[:, None, None] for words in (_MULTIPLIERS, _KEY_STEPS))


def philox(even: torch.Tensor, odd: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Give 4 random words for each counter of 4 words.

    A word has 32 bits, in an int64. Two words stand in one tensor, since each operation costs about as much as a small
    one takes.

    Args:
        even: words 0 and 2 of each counter, [2, rows, counters].
        odd: words 1 and 3.
        key: 2 words of each row, [2, rows, 1].

    Returns:
        int64 of shape [rows, counters, 4].
    """
    multipliers, steps = _constants(key.device)
    for _ in range(_NUM_ROUNDS):
        # A product beyond 63 bits wraps around, and its bits stay right.
        products = even * multipliers
        even = (products >> 32).bitwise_and_(_LOW).flip(0).bitwise_xor_(odd).bitwise_xor_(key)
        odd = products.bitwise_and_(_LOW).flip(0)
        key = key + steps & _LOW
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def gumbel_noise(keys: torch.Tensor, step: int | torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Give independent standard Gumbel numbers.

    Args:
        keys: of `split_seeds`, [rows, 2].
        step: another one gives other numbers; one for all rows, or int64 of shape [rows, 1].
        num_tokens: numbers of each row; the first ones do not depend on how many there are.

    Returns:
        float32 of shape [rows, num_tokens].
    """
    even = keys.new_zeros(2, len(keys), -(-num_tokens // 4))
    even[0] = torch.arange(even.shape[-1], device=keys.device)
    odd = torch.zeros_like(even)
    odd[0] = step
    words = philox(even, odd, keys.T[:, :, None]).flatten(1)[:, :num_tokens]
    # Exponential numbers near 0, which give the highest noise, need more digits of the uniform ones than float32 has.
    exponential = words.double().add_(0.5).mul_(2.0**-32).log_().neg_()
    return exponential.float().log_().neg_()
