"""Who writes what, as pure functions of what all ranks declare: no tensors, no files, no processes.

declared by rank 0:  a [0, 6)            a: |--0--|--0 or 1--|--1--|     every segment gets one writer,
declared by rank 1:  a [3, 9)               0     3          6     9     and no element is left without one
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hfdist.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
"""Replicas are shared out in runs of at most this size, so that one huge embedding has many writers."""

SHOWN = 5
"""How many names an error lists."""

_T = TypeVar("_T")

TensorId = tuple[str, str]
"""Parameter name and key."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A whole named tensor. `dtype` as safetensors spells it."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int

    @property
    def id(self) -> TensorId:
        """What identifies it among all tensors of a checkpoint."""
        return (self.name, self.key)

    @property
    def total(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in a file."""
        return self.total * self.itemsize_bytes


@dataclass(frozen=True, kw_only=True)
class Region:
    """What one rank declares to hold: elements [start, stop) of the flattened tensor."""

    spec: TensorSpec
    start: int
    stop: int

    def to_json(self) -> list[object]:
        """As a list for the exchange."""
        spec = self.spec
        return [spec.name, spec.key, list(spec.shape), spec.dtype, spec.itemsize_bytes, self.start, self.stop]

    @classmethod
    def from_json(cls, values: list[object]) -> Region:
        """From the list of another rank."""
        name, key, shape, dtype, itemsize, start, stop = values
        spec = TensorSpec(name=name, key=key, shape=tuple(shape), dtype=dtype, itemsize_bytes=itemsize)  # type: ignore[arg-type]  # our own list
        return cls(spec=spec, start=start, stop=stop)  # type: ignore[arg-type]  # our own list


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Elements [start, stop) of a tensor, and the one rank that writes them."""

    spec: TensorSpec
    start: int
    stop: int
    writer: int

    @property
    def num_bytes(self) -> int:
        """How much the writer writes."""
        return (self.stop - self.start) * self.spec.itemsize_bytes


@dataclass(frozen=True, kw_only=True)
class _Segment:
    spec: TensorSpec
    start: int
    stop: int
    holders: tuple[int, ...]


def merge_specs(declared: Sequence[Iterable[Region]]) -> dict[TensorId, TensorSpec]:
    """Give the tensors that all ranks speak of, by id.

    Raises:
        CheckpointError: ranks that disagree about a tensor, or a region outside of its tensor.
    """
    specs: dict[TensorId, TensorSpec] = {}
    for region in (region for regions in declared for region in regions):
        spec = specs.setdefault(region.spec.id, region.spec)
        if spec != region.spec:
            raise CheckpointError(
                "the ranks disagree about a tensor",
                where="/".join(spec.id),
                found=f"{spec.dtype}{list(spec.shape)} and {region.spec.dtype}{list(region.spec.shape)}",
            )
        if not 0 <= region.start <= region.stop <= spec.total:
            raise CheckpointError(
                "a rank holds elements that the tensor does not have",
                where="/".join(spec.id),
                found=f"[{region.start}, {region.stop}) of {spec.total}",
            )
    return specs


def assign_writers(declared: Sequence[Sequence[Region]]) -> list[Assignment]:
    """Give every element of every tensor exactly one writer, balanced by bytes; equal on all ranks.

    Args:
        declared: what each rank holds, in order of rank; regions may overlap anyhow.

    Raises:
        CheckpointError: elements that no rank holds, and what `merge_specs` raises.
    """
    segments = list(_segments(declared))
    gaps = [segment for segment in segments if not segment.holders]
    if gaps:
        raise CheckpointError(
            "no rank holds some elements of the model's state: nothing was saved",
            found=shorten(f"{s.spec.name}/{s.spec.key}[{s.start}:{s.stop}]" for s in gaps),
        )
    load = [0] * len(declared)
    assignments = []
    # What has one holder is given first; then the largest runs, each to the holder with the least so far.
    for segment in sorted(segments, key=lambda s: (len(s.holders) > 1, (s.start - s.stop) * s.spec.itemsize_bytes)):
        writer = min(segment.holders, key=lambda holder: (load[holder], holder))
        assignment = Assignment(spec=segment.spec, start=segment.start, stop=segment.stop, writer=writer)
        load[writer] += assignment.num_bytes
        assignments.append(assignment)
    return assignments


def pack_files(specs: Iterable[TensorSpec], limit_bytes: int) -> list[list[TensorSpec]]:
    """Deal tensors into files of at most `limit_bytes` each (a larger tensor gets its own), by name.

    Depends on names and sizes alone, so every layout writes the same files. There is at least one file.
    """
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(specs, key=lambda spec: spec.id):
        if files[-1] and size + spec.num_bytes > limit_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.num_bytes
    return files


def share_out(sizes_bytes: Mapping[_T, int], world_size: int) -> list[list[_T]]:
    """Deal things over ranks so that each gets about as many bytes; equal on all ranks if their order is."""
    shares: list[list[_T]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for item, size_bytes in sorted(sizes_bytes.items(), key=lambda item: -item[1]):
        least = min(range(world_size), key=lambda rank: (load[rank], rank))
        shares[least].append(item)
        load[least] += size_bytes
    return shares


def shorten(names: Iterable[str]) -> str:
    """List the first few names."""
    listed = list(names)
    more = f", and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def _segments(declared: Sequence[Sequence[Region]]) -> Iterator[_Segment]:
    """Cut each tensor wherever a region starts or stops: within a segment the holders are the same."""
    specs = merge_specs(declared)
    edges: dict[TensorId, list[tuple[int, int, int]]] = {tensor_id: [] for tensor_id in specs}
    for rank, regions in enumerate(declared):
        for region in regions:
            if region.start < region.stop:
                edges[region.spec.id] += [(region.start, +1, rank), (region.stop, -1, rank)]
    for tensor_id, spec in sorted(specs.items()):
        held: Counter[int] = Counter()
        position = 0
        for element, change, rank in [*sorted(edges[tensor_id]), (spec.total, 0, 0)]:
            if element > position:
                yield from _chunks(spec, position, element, tuple(sorted(+held)))
                position = element
            held[rank] += change


def _chunks(spec: TensorSpec, start: int, stop: int, holders: tuple[int, ...]) -> Iterator[_Segment]:
    length = max(1, CHUNK_BYTES // spec.itemsize_bytes) if len(holders) > 1 else stop - start
    for first in range(start, stop, length):
        yield _Segment(spec=spec, start=first, stop=min(first + length, stop), holders=holders)
