"""Which rank writes which elements of a checkpoint: pure functions of the regions that all ranks hold.

A tensor whose rows lie on several ranks is split where a region starts or stops. If ranks hold columns, it is a matrix,
which is split into bands of rows. One rank writes a band, and gets the columns of it that it lacks:

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
"""The most bytes of a run that several ranks hold, if a row is not longer."""

_PAGE_BYTES = 4096
"""Ranks that share a run cut it at whole pages, so far as rows allow."""

_T = TypeVar("_T")


class Rectangle(NamedTuple):
    """Rows and columns of a matrix: from `first_row` to before `stop_row`, and so the columns."""

    first_row: int
    stop_row: int
    first_column: int
    stop_column: int


class Region(NamedTuple):
    """Elements [start, stop) of a flattened tensor; or the runs of a piece, of which the last ends at `stop`."""

    spec: TensorSpec
    start: int
    stop: int
    run: int = 0
    """Elements of each run; 0: all elements are one run."""
    pitch: int = 0
    """Elements from the start of a run to that of the next; 0: there is one run."""

    @classmethod
    def from_json(cls, values: list[Any]) -> Region:
        """Make a region from what another rank sent: JSON has lists in place of named tuples."""
        (name, key, shape, dtype), start, stop, run, pitch = values
        return cls(TensorSpec(name, key, tuple(shape), dtype), start, stop, run, pitch)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in a file, if they are one run."""
        return (self.stop - self.start) * self.spec.itemsize_bytes

    def __str__(self) -> str:
        return f"{'/'.join(self.spec.id)}[{self.start}:{self.stop}]"

    def rectangles(self, pitch: int) -> Iterator[Rectangle]:
        """Give the region as rectangles of a matrix with rows of `pitch` elements.

        . . a a a a      a: the end of a row      one run has at most these three;
        b b b b b b      b: whole rows            several runs are one rectangle
        c c c . . .      c: the begin of a row
        """
        first_row, first_column = divmod(self.start, pitch)
        last_row, stop_column = divmod(self.stop, pitch)
        if self.run:
            stop_row = (self.stop - self.run) // pitch + 1
            yield Rectangle(first_row, stop_row, first_column, first_column + self.run)
            return
        if first_row == last_row:
            yield Rectangle(first_row, first_row + 1, first_column, stop_column)
            return
        if first_column > 0:
            yield Rectangle(first_row, first_row + 1, first_column, pitch)
            first_row += 1
        if first_row < last_row:
            yield Rectangle(first_row, last_row, 0, pitch)
        if stop_column > 0:
            yield Rectangle(last_row, last_row + 1, 0, stop_column)

    def offset_of(self, first: int, num_rows: int, length: int, pitch: int) -> int | None:
        """Give where a rectangle of the tensor begins among the elements of this region.

        Args:
            first: first element of the rectangle, counted in the flattened tensor.
            num_rows: number of its rows.
            length: elements of each of its rows.
            pitch: elements from the start of one of its rows to that of the next.

        Returns:
            The number of elements before it; None: not all of the rectangle is in this region.
        """
        if not self.run:
            stop = first + (num_rows - 1) * pitch + length
            is_inside = self.start <= first and stop <= self.stop
            return first - self.start if is_inside else None
        [own] = self.rectangles(self.pitch)
        row, column = divmod(first, self.pitch)
        has_rows = own.first_row <= row and row + num_rows <= own.stop_row
        has_columns = own.first_column <= column and column + length <= own.stop_column
        if not (has_rows and has_columns):
            return None
        return (row - own.first_row) * self.run + column - own.first_column


class Column(NamedTuple):
    """Elements [start, stop) of each row of a segment, and the ranks that hold them."""

    start: int
    stop: int
    holders: tuple[int, ...]

    def sender(self, writer: int) -> int:
        """Give the holder that sends the column to the writer: the writer itself, or the nearest rank to it.

        A near rank is most likely on the same machine.
        """
        index = bisect_left(self.holders, writer)
        return min(self.holders[max(index - 1, 0) : index + 1], key=lambda holder: (abs(holder - writer), holder))


class Segment(NamedTuple):
    """Elements that the same ranks hold, or a part of them that one rank writes at once.

    Either rows of a matrix, of which ranks hold columns; or one run of elements, which is one row of one column.
    """

    region: Region
    columns: tuple[Column, ...]
    """Columns of each row, from left to right."""

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
        """The ranks that hold a part of the segment, in order."""
        if len(self.columns) == 1:
            return self.columns[0].holders
        return tuple(sorted({holder for column in self.columns for holder in column.holders}))

    def rows(self, begin: int, end: int) -> Segment:
        """Give the part of the segment from element `begin` to before `end`: whole rows, if there are columns."""
        region = Region(self.region.spec, self.region.start + begin, self.region.start + end)
        is_one_run = len(self.columns) == 1
        return Segment(region, (Column(0, end - begin, self.holders),) if is_one_run else self.columns)


def merge_specs(declared: Iterable[Region]) -> dict[TensorId, TensorSpec]:
    """Give the tensors of all declared regions, by id.

    Raises:
        CheckpointError: ranks disagree about a tensor, or hold a region outside of it.
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
    """Split tensors into segments that the same ranks hold.

    Args:
        specs: the tensors, by id.
        declared: all regions of these, each with a rank that holds it; they may overlap in any way.

    Raises:
        CheckpointError: no rank holds some elements, or ranks hold columns of matrices of different shapes.
    """
    held: defaultdict[TensorId, list[tuple[int, Region]]] = defaultdict(list)
    for holder, region in declared:
        held[region.spec.id].append((holder, region))
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
    """Choose one writer for each element: the ranks that hold the same segments write equally many bytes of them.

    Of `n` ranks that hold the same, each writes an `n`-th in order of tensors. So all that hold a segment agree on its
    writers, though none knows of other segments.

    Args:
        segments: all segments of which this rank holds a part.

    Returns:
        Pairs of a writer and a part of a segment that it writes at once.
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
    """Cut a segment into the parts that its holders write, each with its writer.

    `position`: bytes of the segments before this one, among the `total` bytes of all that these ranks share. Holder
    number i writes the bytes from total * i / n to total * (i + 1) / n, but for how whole rows and pages are cut.
    """
    pitch = segment.pitch if len(segment.columns) > 1 else 1
    num_rows = (segment.region.stop - segment.region.start) // pitch
    row_bytes = pitch * segment.region.spec.itemsize_bytes
    # Elements that one rank alone holds are cut into chunks when they are written.
    is_alone = len(segment.columns) == 1 and len(holders) == 1
    most_rows = num_rows if is_alone else max(1, CHUNK_BYTES // row_bytes)
    page_rows = max(1, _PAGE_BYTES // row_bytes)
    first = 0
    for number in range(position * len(holders) // total, len(holders)):
        if first == num_rows:
            return
        # Both rounded up: -(-a // b) is the least whole number that is not below a / b.
        share_stop_bytes = -(-total * (number + 1) // len(holders)) - position
        stop = min(-(-share_stop_bytes // row_bytes // page_rows) * page_rows, num_rows)
        for begin in range(first, stop, most_rows):
            end = min(begin + most_rows, stop)
            yield holders[number], segment.rows(begin * pitch, end * pitch)
        first = max(first, stop)


def balance_by_bytes(items: Iterable[tuple[_T, int, Sequence[int]]], world_size: int) -> list[list[_T]]:
    """Give each item to one rank, so that all ranks get about the same number of bytes.

    Args:
        items: each item with its bytes and the ranks that may get it, in the same order on all ranks.
        world_size: number of ranks.

    Returns:
        The items of each rank; the same on all ranks.
    """
    shares: list[list[_T]] = [[] for _ in range(world_size)]
    load = [0] * world_size

    def order(entry: tuple[_T, int, Sequence[int]]) -> tuple[bool, int]:
        _, num_bytes, candidates = entry
        return len(candidates) > 1, -num_bytes

    # First the items that only one rank may get. Then the others, the largest first, to the rank with the fewest bytes.
    for item, num_bytes, candidates in sorted(items, key=order):
        least = min(candidates, key=lambda rank: (load[rank], rank))
        shares[least].append(item)
        load[least] += num_bytes
    return shares


def _runs(spec: TensorSpec, held: Sequence[tuple[int, Region]]) -> Iterator[Segment]:
    """Split a tensor wherever a region starts or stops."""
    changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for holder, region in held:
        changes[region.start].append((holder, +1))
        changes[region.stop].append((holder, -1))
    # How many regions at the present position each rank holds.
    holding: Counter[int] = Counter()
    position = 0
    for element in sorted({*changes, spec.total}):
        if element > position:
            column = Column(0, element - position, tuple(sorted(holding)))
            yield Segment(Region(spec, position, element), (column,))
            position = element
        for holder, change in changes[element]:
            holding[holder] += change
            if holding[holder] == 0:
                # Of all ranks that a tensor has, few hold the same elements.
                del holding[holder]


def _bands(spec: TensorSpec, held: Sequence[tuple[int, Region]], pitch: int) -> Iterator[Segment]:
    """Split a matrix of rows of `pitch` elements wherever a rectangle of a region starts or stops."""
    rectangles = [(holder, rectangle) for holder, region in held for rectangle in region.rectangles(pitch)]
    row_edges, column_edges = {0, spec.total // pitch}, {0, pitch}
    for _, rectangle in rectangles:
        row_edges |= {rectangle.first_row, rectangle.stop_row}
        column_edges |= {rectangle.first_column, rectangle.stop_column}
    rows, columns = sorted(row_edges), sorted(column_edges)
    # Holders of each cell between two edges of rows and two of columns, by where it begins.
    holders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for holder, (first_row, stop_row, first_column, stop_column) in rectangles:
        for row in rows[bisect_left(rows, first_row) : bisect_left(rows, stop_row)]:
            for column in columns[bisect_left(columns, first_column) : bisect_left(columns, stop_column)]:
                holders[row, column].add(holder)
    for first_row, stop_row in pairwise(rows):
        cells = [Column(start, stop, tuple(sorted(holders[first_row, start]))) for start, stop in pairwise(columns)]
        yield Segment(Region(spec, first_row * pitch, stop_row * pitch), tuple(cells))
