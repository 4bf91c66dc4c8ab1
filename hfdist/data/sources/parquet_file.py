"""Parquet files: row groups decoded up to the last row that is asked for, and small ones kept."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hfdist.data.sources.arrow_columns import VALUE_BYTES, Lazy, check_schema, decoded_bytes, made, one_array, texts_at
from hfdist.data.sources.base import (
    BadRow,
    ContentError,
    FileShard,
    Layout,
    damage,
    expands_too_much,
    rows_held_at_once,
)
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.files import INDEX_AGAIN, DataFile
from hfdist.errors import DataError

_BUFFER_BYTES = 1 << 20
_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 4 << 20, 64 << 20
"""Bytes of the largest row group that is kept decoded, and of all together.

A small corpus is read in blocks that are much smaller than its row groups, in a mixed order.
"""
_MOST_REPEATED_BYTES = 64 << 20
"""Bytes that repeated values may take of the rows that are read together."""
_MOST_DECODED_BYTES = 256 << 20
"""Bytes that a file may always become: a page may be as large as its row group, and is decoded whole."""


class _Recent:
    """Row groups that this process has decoded last."""

    def __init__(self) -> None:
        self._columns: OrderedDict[tuple[ParquetShard, int], list[pa.Array]] = OrderedDict()
        self.num_bytes = 0

    def get(self, shard: ParquetShard, group: int) -> list[pa.Array] | None:
        columns = self._columns.get((shard, group))
        if columns is not None:
            self._columns.move_to_end((shard, group))
        return columns

    def put(self, shard: ParquetShard, group: int, columns: list[pa.Array]) -> None:
        self._columns[shard, group] = columns
        self.num_bytes += _num_bytes(columns)
        while self.num_bytes > _MOST_KEPT_BYTES:
            self.num_bytes -= _num_bytes(self._columns.popitem(last=False)[1])


def _num_bytes(columns: list[pa.Array]) -> int:
    return sum(column.nbytes for column in columns)


recent = _Recent()


class ParquetShard(FileShard):
    """One file. Only the columns that are asked for are read; of a large row group, up to the last row asked for."""

    def __init__(self, file: DataFile, identity: str, rows: RowReader, layout: Layout | None = None) -> None:
        self._rows = rows
        self._dictionaries_of: dict[int, list[str]] = {}
        super().__init__(file, identity, layout, gives_examples=rows.gives_examples)
        if layout is not None and rows.keeps_columns:
            # An index counts the columns of the format alone.
            self.rows_at_once = rows_held_at_once(self._footer.layout.held_bytes, sum(self.runs))

    def _find_layout(self) -> Layout:
        # Only the end of a remote file is asked for. The handle is not kept: workers are forked, and would share its
        # position.
        self._footer = self._read_footer(self.file.open)
        return self._footer.layout

    @cached_property
    def _footer(self) -> _Footer:
        """What the file says of itself, read when the first row is."""
        with self.file.local() as path:
            footer = self._read_footer(lambda: path.open("rb"))
        if footer.layout.runs.tolist() != self.runs:
            raise DataError("the index of the source describes another file", where=self.file.url, hint=INDEX_AGAIN)
        return footer

    def _read_footer(self, open_file: Callable[[], BinaryIO]) -> _Footer:
        try:
            with open_file() as opened:
                metadata = pq.read_metadata(opened)
            schema = metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise damage("not a whole parquet file", error, where=self.file.url) from error
        columns = check_schema(schema, self._rows, where=self.file.url)
        leaves = _leaves(metadata, columns)
        groups = [_group_of(metadata.row_group(index), [*leaves]) for index in range(metadata.num_row_groups)]
        packed_bytes = sum(group.packed_bytes for group in groups)
        text_bytes = sum(group.decoded_bytes for group in groups)
        if expands_too_much(packed_bytes, text_bytes, allowed_bytes=_MOST_DECODED_BYTES):
            raise ContentError(
                "what is read of it expands beyond reason",
                where=f"{self.file.url}, column {', '.join(columns)}",
                found=f"{packed_bytes:,} bytes that become {text_bytes:,}",
            )
        layout = Layout(
            np.array([group.num_rows for group in groups], dtype=np.int64),
            np.array([group.first_byte for group in groups], dtype=np.int64),
            text_bytes,
        )
        # Other types have no dictionaries in Arrow.
        byte_arrays = [leaf.path for leaf in leaves.values() if leaf.physical_type == "BYTE_ARRAY"]
        return _Footer(layout, columns, byte_arrays, any(leaf.max_repetition_level for leaf in leaves.values()), groups)

    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of rows; all in one row group. Examples are decoded one by one, as they are taken.

        After a damaged place of a row group all rows are bad. Those before it are not, whatever is asked together.
        """
        group, first = self._run_of(rows[0])
        with self.file.local() as path:
            texts, missing = self._decode_rows(path, group, first, sorted(rows))
        found = (made(texts.get(row, missing)) for row in rows)
        return found if self.gives_examples else list(found)

    def _decode_rows(self, path: Path, group: int, first: int, rows: list[int]) -> tuple[dict[int, Lazy], BadRow]:
        """Decode in the order of the file; also give what stands for rows that are not in the result."""
        wanted = np.array(rows, dtype=np.int64) - first
        texts: dict[int, Lazy] = {}
        start, where = 0, f"{self.file.url}, row group {group}"
        missing = ContentError("the file is damaged: it ends before its last row", where=where)
        try:
            for column in self._arrays(path, group):
                inside = wanted[(wanted >= start) & (wanted < start + len(column))] - start
                if len(inside):
                    found = (inside + first + start).tolist()
                    read = texts_at(column, inside.tolist(), found, self._rows, where=self.file.url)
                    texts.update(zip(found, read, strict=True))
                start += len(column)
                if start > wanted[-1]:
                    break
        except (pa.ArrowException, OSError) as error:
            missing = damage("the file is damaged", error, where=where)
        return texts, BadRow(missing)

    def _arrays(self, path: Path, group: int) -> Iterator[pa.Array]:
        kept = recent.get(self, group)
        if kept is None and self._footer.groups[group].decoded_bytes <= _LARGEST_KEPT_BYTES:
            # A damaged one is decoded row by row below, up to the damage.
            with contextlib.suppress(pa.ArrowException, OSError):
                # Together: each batch would hold a dictionary of its own.
                kept = list(self._decode(path, group, num_rows=self.runs[group], dictionaries=self._footer.byte_arrays))
                recent.put(self, group, kept)
        if kept is None:
            dictionaries = self._dictionaries(path, group)
            yield from self._decode(path, group, num_rows=self.rows_at_once, dictionaries=dictionaries)
        else:
            yield from kept

    def _dictionaries(self, path: Path, group: int) -> list[str]:
        """Give the columns of a large row group that are read as dictionaries.

        One value of a small file can stand for a million. But of a column that goes on without its dictionary, as most
        do, Arrow adds each value to the one in memory, and copies that for each batch.
        """
        if group not in self._dictionaries_of:
            sizes, columns = self._footer.groups[group], self._footer.byte_arrays
            if not self._footer.has_lists:
                column = next(self._decode(path, group, num_rows=1, dictionaries=columns))
                largest_bytes = _largest_row(column)
                is_small = largest_bytes * self.rows_at_once <= _MOST_REPEATED_BYTES
                all_bytes, allowed_bytes = largest_bytes * self.runs[group], _MOST_DECODED_BYTES
                if is_small and not expands_too_much(sizes.packed_bytes, all_bytes, allowed_bytes=allowed_bytes):
                    columns = []
            self._dictionaries_of[group] = columns
        return self._dictionaries_of[group]

    def _decode(self, path: Path, group: int, *, num_rows: int, dictionaries: list[str]) -> Iterator[pa.Array]:
        options = {"read_dictionary": dictionaries, "buffer_size": _BUFFER_BYTES, "page_checksum_verification": True}
        with pq.ParquetFile(path, **options) as file:
            for batch in file.iter_batches(num_rows, [group], self._footer.columns, use_threads=False):
                yield one_array(batch, self._rows)


def _largest_row(column: pa.Array) -> int:
    """Bytes of a row that has the largest value of each dictionary. Args: column: texts, or structs without lists."""
    children = column.flatten() if pa.types.is_struct(column.type) else [column]
    dictionaries = [child.dictionary for child in children if isinstance(child, pa.DictionaryArray)]
    return sum(int(decoded_bytes(values).max(initial=0)) for values in dictionaries)


def _leaves(metadata: pq.FileMetaData, columns: list[str]) -> dict[int, pq.ColumnSchema]:
    """Give what is stored of some columns, by number: of a nested one each value, as messages.list.element.role."""
    every = {number: metadata.schema.column(number) for number in range(metadata.num_columns)}
    return {n: leaf for n, leaf in every.items() if leaf.path in columns or leaf.path.split(".")[0] in columns}


class _Group(NamedTuple):
    """What the footer tells of a row group, and of the leaves of it that are read."""

    num_rows: int
    first_byte: int
    packed_bytes: int
    decoded_bytes: int
    """Bytes in memory, where a value of a dictionary counts once."""


class _Footer(NamedTuple):
    """What the footer tells of what is read of a file."""

    layout: Layout
    columns: list[str]
    byte_arrays: list[str]
    """Paths of the leaves that may have a dictionary."""
    has_lists: bool
    groups: list[_Group]


def _group_of(group: pq.RowGroupMetaData, leaves: list[int]) -> _Group:
    chunks, first = [group.column(number) for number in leaves], group.column(0)
    return _Group(
        group.num_rows,
        int(first.dictionary_page_offset or first.data_page_offset),
        sum(chunk.total_compressed_size for chunk in chunks),
        # Each value has its place in memory, also where a million equal ones take a few bytes in the file.
        sum(chunk.total_uncompressed_size + VALUE_BYTES * chunk.num_values for chunk in chunks),
    )
