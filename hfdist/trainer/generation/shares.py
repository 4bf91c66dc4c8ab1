"""Rows that all ranks have, shared out to the data ranks; and the tokens that data ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from hfdist.collectives import device_of
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits

T = TypeVar("T")


def share_of_rank(rows: Sequence[T], topology: Topology) -> list[T]:
    """Give the rows of this data rank, at least one in all; copies of the first fill up the shares to equal sizes."""
    size = _share_size(len(rows), topology)
    numbers = range(topology.data_rank * size, (topology.data_rank + 1) * size)
    return [rows[number] if number < len(rows) else rows[0] for number in numbers]


def join_shares(
    parts: list[torch.Tensor], num_rows: int, limits: GenerationLimits, topology: Topology
) -> list[list[int]]:
    """Give all ranks what was written after all rows, without the tokens that end it. A collective.

    Args:
        parts: tokens of this data rank's share of the rows, as `exchange` takes them; -1 stands where a row has ended.
        num_rows: number of rows of all shares, without the copies.
        limits: says at which token or length a row ends.
        topology: the place of this rank.
    """
    shares = exchange(parts, _share_size(num_rows, topology), limits.max_new_tokens, topology)
    return [
        [token for token in tokens if token >= 0 and token not in limits.end_ids]
        for tokens in shares.flatten(0, 1)[:num_rows].tolist()
    ]


def _share_size(num_rows: int, topology: Topology) -> int:
    return -(-num_rows // topology.data)


def exchange(parts: list[torch.Tensor], num_rows: int, num_tokens: int, topology: Topology) -> torch.Tensor:
    """Give all ranks the tokens of all data ranks. A collective.

    Args:
        parts: tokens of this data rank's rows, [rows, tokens] each; none if another rank of the replica has them.
        num_rows: number of rows of each data rank; further rows of `parts` are left out.
        num_tokens: number of tokens of each row.
        topology: the place of this rank.

    Returns:
        Tokens of shape [data ranks, rows, tokens], on the CPU.
    """
    # Token ids are not negative, and all ranks that know a row's tokens know the same.
    device = device_of(None) if dist.is_initialized() else torch.device("cpu")
    tokens = torch.full((topology.data, num_rows, num_tokens), -1, device=device)
    if parts:
        tokens[topology.data_rank] = torch.cat(parts)[:num_rows].to(device)
    if dist.is_initialized():
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
    return tokens.cpu()
