"""Who writes what: pure functions of what all ranks declare; no tensors, no files, no processes.

A tensor whose rows lie on several ranks is split where a region starts or stops. If ranks hold columns, it is a matrix,
which is split into bands of rows; one rank writes a band, and gets the columns that it has not:

    declared by rank 0:  columns [0, 3)        a: |--0--|--1--|     written by rank 0
    declared by rank 1:  columns [3, 6)           |--0--|--1--|     written by rank 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from hfdist.checkpoint.safetensors_io import TensorId, TensorSpec
from hfdist.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
"""If several ranks hold the same elements, each writes runs of at most this size: a huge embedding has many writers."""

_SHOWN = 5
"""How many names an error lists."""

_T = TypeVar("_T")


class Region(NamedTuple):
    """Elements [start, stop) of a flattened tensor; or the runs of a piece, of which the last ends at `stop`."""

    spec: TensorSpec
    start: int
    stop: int
    run: int = 0
    """Elements of each run, as in `Piece`."""
    pitch: int = 0

    @classmethod
    def from_json(cls, values: list[Any]) -> Region:
        """Make a region from what another rank sent: JSON has lists in place of named tuples."""
        (name, key, shape, dtype), *place = values
        return cls(TensorSpec(name, key, tuple(shape), dtype), *place)

    @property
    def num_bytes(self) -> int:
        """Size in a file, if all is one run."""
        return (self.stop - self.start) * self.spec.itemsize_bytes

    def __str__(self) -> str:
        return f"{'/'.join(self.spec.id)}[{self.start}:{self.stop}]"

    def rectangles(self, pitch: int) -> Iterator[tuple[int, int, int, int]]:
        """Give the region as rectangles of a matrix with rows of `pitch`.

        Each is its first row, one past the last, its first column, one past the last.
        """
        (first, column), (last, end) = divmod(self.start, pitch), divmod(self.stop, pitch)
        if self.run:
            yield first, (self.stop - self.run) // pitch + 1, column, column + self.run
            return
        if first == last:
            yield first, first + 1, column, end
            return
        if column > 0:
            yield first, first + 1, column, pitch
            first += 1
        if first < last:
            yield first, last, 0, pitch
        if end > 0:
            yield last, last + 1, 0, end

    def offset_of(self, first: int, num_rows: int, length: int, pitch: int) -> int | None:
        """Give the place, in the piece, of a rectangle that begins with element `first`; None: not all is in it."""
        if not self.run:
            stop = first + (num_rows - 1) * pitch + length
            return first - self.start if self.start <= first and stop <= self.stop else None
        [(own_row, stop_row, own_column, stop_column)] = self.rectangles(self.pitch)
        row, column = divmod(first, self.pitch)
        is_inside = own_row <= row and row + num_rows <= stop_row
        is_inside = is_inside and own_column <= column and column + length <= stop_column
        return (row - own_row) * self.run + column - own_column if is_inside else None


class Column(NamedTuple):
    """Elements [start, stop) of each row of a segment, and the ranks that hold them."""

    start: int
    stop: int
    holders: tuple[int, ...]

    def sender(self, writer: int) -> int:
        """Give the rank that gives them to the writer: itself, or a near one, which shares a machine most likely."""
        return min(self.holders, key=lambda holder: (abs(holder - writer), holder))


class Segment(NamedTuple):
    """What one rank writes at once: whole rows, put together from columns. If it is one column, it has one row."""

    region: Region
    columns: tuple[Column, ...]

    @property
    def pitch(self) -> int:
        """Elements of a row."""
        return self.columns[-1].stop

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return (self.region.stop - self.region.start) // self.pitch

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold a part of it."""
        return tuple(sorted({holder for column in self.columns for holder in column.holders}))


def merge_specs(declared: Sequence[Iterable[Region]]) -> dict[TensorId, TensorSpec]:
    """Give all tensors that any rank declares, by id.

    It is a `CheckpointError` if ranks disagree about a tensor, or hold a region outside of it.
    """
    specs: dict[TensorId, TensorSpec] = {}
    for own, start, stop, run, pitch in (region for regions in declared for region in regions):
        spec = specs.setdefault(own.id, own)
        where = "/".join(spec.id)
        if spec != own:
            raise CheckpointError("the ranks disagree about a tensor", where=where, found=f"{spec} and {own}")
        if not 0 <= start <= stop <= spec.total:
            what = "a rank holds elements that the tensor does not have"
            raise CheckpointError(what, where=where, found=f"[{start}, {stop}) of {spec.total}")
        if run and (spec.total % pitch != 0 or start % pitch + run > pitch or (stop - start - run) % pitch != 0):
            what = "a rank holds runs that are no columns of the tensor"
            raise CheckpointError(what, where=where, found=f"[{start}, {stop}) in runs of {run} every {pitch}")
    return specs


def assign_writers(declared: Sequence[Sequence[Region]]) -> list[list[Segment]]:
    """Give every element of every tensor exactly one writer, balanced by bytes; equal on all ranks.

    Arguments and result are by rank. Regions may overlap in any way. Elements that no rank holds are a
    `CheckpointError`.
    """
    segments = list(_segments(declared))
    gaps = [str(segment.region) for segment in segments if not all(column.holders for column in segment.columns)]
    if gaps:
        what = "no rank holds some elements of the model's state: nothing was saved"
        raise CheckpointError(what, found=list_first(gaps))
    return balance_by_bytes(
        [(segment, segment.region.num_bytes, segment.holders) for segment in segments], len(declared)
    )


def balance_by_bytes(items: Iterable[tuple[_T, int, Sequence[int]]], world_size: int) -> list[list[_T]]:
    """Give each item to one rank, so that all ranks get about the same number of bytes.

    An item comes with its bytes and the ranks that may get it. If the order of the items is equal on all
    ranks, the result is, too.
    """
    shares: list[list[_T]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    # First the items that only one rank may get. Then the others, the largest first, to the rank with the fewest bytes.
    for item, num_bytes, candidates in sorted(items, key=lambda item: (len(item[2]) > 1, -item[1])):
        least = min(candidates, key=lambda rank: (load[rank], rank))
        shares[least].append(item)
        load[least] += num_bytes
    return shares


def list_first(names: Sequence[str]) -> str:
    """List the first few names."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _segments(declared: Sequence[Sequence[Region]]) -> Iterator[Segment]:
    specs = merge_specs(declared)
    held: dict[TensorId, list[tuple[int, Region]]] = {tensor_id: [] for tensor_id in specs}
    for holder, regions in enumerate(declared):
        for region in regions:
            if region.start < region.stop:
                held[region.spec.id].append((holder, region))
    for tensor_id, spec in sorted(specs.items()):
        pitches = {region.pitch for _, region in held[tensor_id] if region.run}
        if len(pitches) > 1:
            what, found = "the ranks shard a tensor by columns of different matrices", f"rows of {sorted(pitches)}"
            raise CheckpointError(what, where="/".join(tensor_id), found=found)
        yield from _bands(spec, held[tensor_id], pitches.pop()) if pitches else _runs(spec, held[tensor_id])


def _runs(spec: TensorSpec, held: Sequence[tuple[int, Region]]) -> Iterator[Segment]:
    """Split a tensor wherever a region starts or stops."""
    edges = [edge for holder, region in held for edge in ((region.start, +1, holder), (region.stop, -1, holder))]
    holding: Counter[int] = Counter()
    position = 0
    for element, change, holder in [*sorted(edges), (spec.total, 0, 0)]:
        if element > position:
            yield from _split(spec, position, element, (Column(0, 1, tuple(sorted(+holding))),))
            position = element
        holding[holder] += change


def _bands(spec: TensorSpec, held: Sequence[tuple[int, Region]], pitch: int) -> Iterator[Segment]:
    """Split a matrix of rows of `pitch` elements wherever a rectangle of a region starts or stops."""
    rectangles = [(holder, *place) for holder, region in held for place in region.rectangles(pitch)]
    rows = sorted({0, spec.total // pitch}.union(*(place[1:3] for place in rectangles)))
    columns = sorted({0, pitch}.union(*(place[3:] for place in rectangles)))
    holders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for holder, first, last, begin, end in rectangles:
        for row in rows[bisect_left(rows, first) : bisect_left(rows, last)]:
            for column in columns[bisect_left(columns, begin) : bisect_left(columns, end)]:
                holders[row, column].add(holder)
    for first, last in pairwise(rows):
        cells = tuple(Column(a, b, tuple(sorted(holders[first, a]))) for a, b in pairwise(columns))
        yield from _split(spec, first * pitch, last * pitch, cells)


def _split(spec: TensorSpec, start: int, stop: int, columns: tuple[Column, ...]) -> Iterator[Segment]:
    """Split what has several holders into parts of whole rows, of at most `CHUNK_BYTES` where a row is no more."""
    pitch = 1 if len(columns) == 1 else columns[-1].stop
    length = stop - start
    if len(columns) > 1 or len(columns[0].holders) > 1:
        length = max(1, CHUNK_BYTES // (spec.itemsize_bytes * pitch)) * pitch
    for begin in range(start, stop, length):
        end = min(begin + length, stop)
        own = (Column(0, end - begin, columns[0].holders),) if len(columns) == 1 else columns
        yield Segment(Region(spec, begin, end), own)
