"""Compares the bits of parameters between the ranks that hold the same ones, and finds the rank that differs."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hfdist.collectives import gather_json

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers by their size in bytes."""


@dataclass(frozen=True)
class Difference:
    """Parameters whose bits the ranks that hold them do not agree on."""

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks that differ from the majority; without a majority, all ranks that hold the parameters."""
    has_majority: bool


def find_differences(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Compare the parameters that this rank holds whole, by their names, with those of all others.

    All ranks get the same lines, one for each group of ranks that differs. A collective, of a few bytes if all is well.
    """
    sums = sum_bits(parameters)
    values_by_names: dict[str, set[str]] = defaultdict(set)
    for digests in gather_json(_digests(sums)):
        for names, values in digests:
            values_by_names[names].add(values)
    if all(len(values) == 1 for values in values_by_names.values()):
        return []
    # Only now the ranks send all their sums.
    held, hosts = zip(*gather_json([sums, socket.gethostname()]), strict=True)
    return [_describe(difference, hosts) for difference in vote(held)]


def _digests(sums: Mapping[str, int]) -> list[tuple[str, str]]:
    """Give digests of names and of sums: of the whole parameters, and of the parts of each axis (`name_part`).

    Ranks of a tensor or expert group have other parts, and hold the same whole parameters.
    """
    by_part: dict[str, dict[str, int]] = defaultdict(dict)
    for name, value in sums.items():
        # No parameter's own name has a space.
        _, _, part = name.partition(" ")
        by_part[part][name] = value
    return [(_digest(list(part)), _digest(list(part.values()))) for part in by_part.values()]


def _digest(values: Sequence[str | int]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def sum_bits(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Give the sum of each parameter's elements, taken as whole numbers: any one bit that flips changes it."""
    named = [(name, tensor.detach()) for name, tensor in parameters]
    sums = [tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64) for _, tensor in named]
    # Stacked first, so that the host waits for the GPU once.
    values = torch.stack(sums).tolist() if sums else []
    return dict(zip((name for name, _ in named), values, strict=True))


def vote(held: Sequence[Mapping[str, int]]) -> list[Difference]:
    """Find which ranks differ, from the sums that each rank has by parameter; not all ranks hold all parameters."""
    ranks_by_sum: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(held):
        for name, value in sums.items():
            ranks_by_sum[name][value].append(rank)
    found: dict[tuple[tuple[int, ...], bool], list[str]] = defaultdict(list)
    for name, groups in ranks_by_sum.items():
        if len(groups) == 1:
            continue
        holders = sorted(rank for ranks in groups.values() for rank in ranks)
        most = max(groups.values(), key=len)
        has_majority = 2 * len(most) > len(holders)
        differing = sorted(set(holders) - set(most)) if has_majority else holders
        found[tuple(differing), has_majority].append(name)
    return [Difference(tuple(names), ranks, has_majority) for (ranks, has_majority), names in found.items()]


def _describe(difference: Difference, hosts: Sequence[str]) -> str:
    names = difference.parameters
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
    who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in difference.ranks)
    verdict = "differs from the majority" if difference.has_majority else "differ, and no majority says which is wrong"
    return f"{what}: {who} {verdict}"
