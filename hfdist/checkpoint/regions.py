"""Who writes what: pure functions of what all ranks declare; no tensors, no files, no processes.

A tensor whose rows lie on several ranks is split where a region starts or stops. If ranks hold columns, it is a matrix,
which is split into bands of rows; one rank writes a band, and gets the columns that it has not:

    declared by rank 0:  columns [0, 3)        a: |--0--|--1--|     written by rank 0
    declared by rank 1:  columns [3, 6)           |--0--|--1--|     written by rank 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from hfdist.checkpoint.piece import is_number
from hfdist.checkpoint.safetensors_io import TensorId, TensorSpec
from hfdist.errors import CheckpointError
from hfdist.units import list_first

CHUNK_BYTES = 64 * 2**20
"""What several ranks hold is written in runs of at most this size, where a row is no more."""

_PAGE_BYTES = 4096
"""Ranks that share a run cut it at whole pages, so far as rows allow."""


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
        index = bisect_left(self.holders, writer)
        return min(self.holders[max(index - 1, 0) : index + 1], key=lambda holder: (abs(holder - writer), holder))


class Segment(NamedTuple):
    """Whole rows, put together from columns: what the same ranks hold, or a part that one of them writes at once.

    If it is one column, it has one row.
    """

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
        """The ranks that hold a part of it, in order."""
        if len(self.columns) == 1:
            return self.columns[0].holders
        return tuple(sorted({holder for column in self.columns for holder in column.holders}))

    def rows(self, begin: int, end: int) -> Segment:
        """Give the rows from element `begin` to before `end`, or of one column these elements."""
        region = Region(self.region.spec, self.region.start + begin, self.region.start + end)
        return Segment(region, self.columns if len(self.columns) > 1 else (Column(0, end - begin, self.holders),))


def merge_specs(declared: Iterable[Region]) -> dict[TensorId, TensorSpec]:
    """Give all tensors that any rank declares, by id.

    It is a `CheckpointError` if ranks disagree about a tensor, or hold a region outside of it.
    """
    specs: dict[TensorId, TensorSpec] = {}
    for own, start, stop, run, pitch in declared:
        spec = specs.setdefault(own.id, own)
        where = "/".join(spec.id)
        # The types of numbers may differ; their values, which must agree, travel apart.
        if spec != own and not (is_number(own.key) and spec.shape == own.shape):
            raise CheckpointError("the ranks disagree about a tensor", where=where, found=f"{spec} and {own}")
        if not 0 <= start <= stop <= spec.total:
            what = "a rank holds elements that the tensor does not have"
            raise CheckpointError(what, where=where, found=f"[{start}, {stop}) of {spec.total}")
        if run and (spec.total % pitch != 0 or start % pitch + run > pitch or (stop - start - run) % pitch != 0):
            what = "a rank holds runs that are no columns of the tensor"
            raise CheckpointError(what, where=where, found=f"[{start}, {stop}) in runs of {run} every {pitch}")
    return specs


def split_tensors(specs: Mapping[TensorId, TensorSpec], declared: Iterable[tuple[int, Region]]) -> list[Segment]:
    """Split tensors into what the same ranks hold, from all their regions, each with the rank that holds it.

    Regions may overlap in any way. Elements that no rank holds are a `CheckpointError`.
    """
    held: dict[TensorId, list[tuple[int, Region]]] = {}
    for holder, region in declared:
        held.setdefault(region.spec.id, []).append((holder, region))
    segments: list[Segment] = []
    for tensor_id, of_tensor in held.items():
        filled = [(holder, region) for holder, region in of_tensor if region.start < region.stop]
        pitches = {region.pitch for _, region in filled if region.run}
        if len(pitches) > 1:
            what, found = "the ranks shard a tensor by columns of different matrices", f"rows of {sorted(pitches)}"
            raise CheckpointError(what, where="/".join(tensor_id), found=found)
        spec = specs[tensor_id]
        segments += _bands(spec, filled, pitches.pop()) if pitches else _runs(spec, filled)
    gaps = [str(segment.region) for segment in segments if not all(column.holders for column in segment.columns)]
    if gaps:
        what = "no rank holds some elements of the model's state: nothing was saved"
        raise CheckpointError(what, found=list_first(gaps))
    return segments


def assign_writers(segments: Iterable[Segment]) -> Iterator[tuple[int, Segment]]:
    """Give each element of segments one writer: the ranks that hold the same segments write equally many bytes of them.

    Of `n` ranks that hold the same, each writes an `n`-th in order of tensors. So all that hold a segment agree on its
    writers, though none knows of other segments; `segments` are all of which this rank holds a part.
    """
    by_holders: defaultdict[tuple[int, ...], list[Segment]] = defaultdict(list)
    for segment in sorted(segments):
        by_holders[segment.holders].append(segment)
    for holders, shared in by_holders.items():
        total, position = sum(segment.region.num_bytes for segment in shared), 0
        for segment in shared:
            yield from _share(segment, holders, position, total)
            position += segment.region.num_bytes


def _share(segment: Segment, holders: Sequence[int], position: int, total: int) -> Iterator[tuple[int, Segment]]:
    """Cut a segment that begins `position` bytes into the `total` of what its holders share."""
    pitch = segment.pitch if len(segment.columns) > 1 else 1
    num_rows = (segment.region.stop - segment.region.start) // pitch
    row_bytes = pitch * segment.region.spec.itemsize_bytes
    # What one rank alone holds is cut when it is written.
    is_alone = len(segment.columns) == 1 and len(holders) == 1
    most_rows = num_rows if is_alone else max(1, CHUNK_BYTES // row_bytes)
    page_rows = max(1, _PAGE_BYTES // row_bytes)
    first = 0
    for number in range(position * len(holders) // total, len(holders)):
        if first == num_rows:
            return
        share_stop = -(-total * (number + 1) // len(holders)) - position
        stop = min(-(-share_stop // row_bytes // page_rows) * page_rows, num_rows)
        for begin in range(first, stop, most_rows):
            end = min(begin + most_rows, stop)
            yield holders[number], segment.rows(begin * pitch, end * pitch)
        first = max(first, stop)


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


def _runs(spec: TensorSpec, held: Sequence[tuple[int, Region]]) -> Iterator[Segment]:
    """Split a tensor wherever a region starts or stops."""
    edges = [edge for holder, region in held for edge in ((region.start, +1, holder), (region.stop, -1, holder))]
    holding: Counter[int] = Counter()
    position = 0
    for element, change, holder in [*sorted(edges), (spec.total, 0, -1)]:
        if element > position:
            yield Segment(Region(spec, position, element), (Column(0, element - position, tuple(sorted(holding))),))
            position = element
        holding[holder] += change
        if not holding[holder]:
            # Few of a tensor's ranks hold the same elements, so that `holding` stays small.
            del holding[holder]


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
        yield Segment(Region(spec, first * pitch, last * pitch), cells)
