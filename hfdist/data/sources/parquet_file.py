"""Parquet files: a row group is decoded up to the last row that is asked for, and a small one is kept decoded.

A file is row groups, one after the other, and a footer that describes them. A row group has a chunk for each leaf: a
column, or each value of a nested one. A leaf may have a dictionary of its values, before places in it.
"""

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

from hfdist.data.sources.arrow_columns import (
    VALUE_BYTES,
    LazyText,
    check_schema,
    decoded_bytes,
    make_text,
    one_array,
    texts_at,
)
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
"""Bytes of a row group that are read from the disk at a time."""
_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 4 << 20, 64 << 20
"""Bytes of the largest row group that is kept decoded, and of all that are kept.

They are kept because a small corpus is read in a mixed order, in blocks that are much smaller than its row groups.
"""
_MOST_REPEATED_BYTES = 64 << 20
"""Bytes that the values of a dictionary may take in the rows that are read together."""
_MOST_DECODED_BYTES = 256 << 20
"""Bytes that any file may become when it is decoded, however small it is."""


class _Recent:
    """The row groups that this process has decoded last, up to `_MOST_KEPT_BYTES`."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[ParquetShard, int], list[pa.Array]] = OrderedDict()
        self.num_bytes = 0

    def get(self, shard: ParquetShard, group: int) -> list[pa.Array] | None:
        """Give the arrays of a row group, end to end; None: it is not kept."""
        arrays = self._arrays.get((shard, group))
        if arrays is not None:
            self._arrays.move_to_end((shard, group))
        return arrays

    def put(self, shard: ParquetShard, group: int, arrays: list[pa.Array]) -> None:
        """Keep a row group; those that were used longest ago make room."""
        self._arrays[shard, group] = arrays
        self.num_bytes += _num_bytes(arrays)
        while self.num_bytes > _MOST_KEPT_BYTES:
            _, oldest = self._arrays.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest)


def _num_bytes(arrays: list[pa.Array]) -> int:
    return sum(array.nbytes for array in arrays)


recent = _Recent()
"""The row groups of all shards of this process."""


class ParquetShard(FileShard):
    """The rows of one parquet file. Only the columns that the source needs are read."""

    def __init__(self, file: DataFile, identity: str, rows: RowReader, layout: Layout | None = None) -> None:
        self._rows = rows
        self._dictionaries_of: dict[int, list[str]] = {}
        super().__init__(file, identity, layout, gives_examples=rows.gives_examples)
        if layout is not None and rows.keeps_columns:
            # An index counts the bytes of the format's columns alone.
            self.rows_at_once = rows_held_at_once(self._footer.layout.held_bytes, sum(self.runs))

    def _find_layout(self) -> Layout:
        # Only the end of a remote file is asked for. The handle is not kept: workers are forked, and would share its
        # position.
        self._footer = self._read_footer(self.file.open)
        return self._footer.layout

    @cached_property
    def _footer(self) -> _Footer:
        """The footer of a file whose layout an index has; DataError: it describes another file than the index."""
        with self.file.local() as path:
            footer = self._read_footer(lambda: path.open("rb"))
        if footer.layout.runs.tolist() != self.runs:
            raise DataError("the index of the source describes another file", where=self.file.url, hint=INDEX_AGAIN)
        return footer

    def _read_footer(self, open_file: Callable[[], BinaryIO]) -> _Footer:
        """Read the footer of the file; ContentError: it is damaged, lacks columns, or expands beyond reason."""
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
        # Arrow reads no other types as dictionaries.
        byte_arrays = [leaf.path for leaf in leaves.values() if leaf.physical_type == "BYTE_ARRAY"]
        has_lists = any(leaf.max_repetition_level for leaf in leaves.values())
        return _Footer(layout, columns, byte_arrays, has_lists, groups)

    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of rows, all of one row group. Examples are decoded one by one, as they are taken.

        All rows after a damaged place of a row group are bad; the rows before it are not.
        """
        group, first = self._run_of(rows[0])
        with self.file.local() as path:
            texts, missing = self._decode_rows(path, group, first, sorted(rows))
        in_order = (make_text(texts.get(row, missing)) for row in rows)
        return in_order if self.gives_examples else list(in_order)

    def _decode_rows(self, path: Path, group: int, first: int, rows: list[int]) -> tuple[dict[int, LazyText], BadRow]:
        """Decode rows in the order of the file; give their texts by row, and the bad row that stands for all others."""
        wanted = np.array(rows, dtype=np.int64) - first
        texts: dict[int, LazyText] = {}
        where = f"{self.file.url}, row group {group}"
        # Rows are counted from the start of the group in `wanted` and `start`, from that of the file in `rows`.
        start = 0
        missing = ContentError("the file is damaged: it ends before its last row", where=where)
        try:
            for array in self._arrays(path, group):
                places = wanted[(wanted >= start) & (wanted < start + len(array))] - start
                if len(places):
                    numbers = (places + first + start).tolist()
                    decoded = texts_at(array, places.tolist(), numbers, self._rows, where=self.file.url)
                    texts.update(zip(numbers, decoded, strict=True))
                start += len(array)
                if start > wanted[-1]:
                    break
        except (pa.ArrowException, OSError) as error:
            missing = damage("the file is damaged", error, where=where)
        return texts, BadRow(missing)

    def _arrays(self, path: Path, group: int) -> Iterator[pa.Array]:
        """Give the values of a row group, some rows at a time; a small group is decoded whole, and kept."""
        kept = recent.get(self, group)
        if kept is None and self._footer.groups[group].decoded_bytes <= _LARGEST_KEPT_BYTES:
            # A damaged group is decoded again below, some rows at a time, up to the damage.
            with contextlib.suppress(pa.ArrowException, OSError):
                # All rows in one batch, since each batch would hold a dictionary of its own.
                kept = list(self._decode(path, group, num_rows=self.runs[group], dictionaries=self._footer.byte_arrays))
                recent.put(self, group, kept)
        if kept is None:
            dictionaries = self._dictionaries(path, group)
            yield from self._decode(path, group, num_rows=self.rows_at_once, dictionaries=dictionaries)
        else:
            yield from kept

    def _dictionaries(self, path: Path, group: int) -> list[str]:
        """Give the leaves of a large row group that Arrow is to keep as dictionaries: all, or none.

        A dictionary guards the memory: one large value of a small file can stand in a million rows. But it is slow
        where a leaf goes on without its dictionary, as most leaves do: Arrow then adds each value to the dictionary in
        memory, and copies that for each batch.
        """
        if group not in self._dictionaries_of:
            is_safe = not self._footer.has_lists and self._is_small_without_dictionaries(path, group)
            self._dictionaries_of[group] = [] if is_safe else self._footer.byte_arrays
        return self._dictionaries_of[group]

    def _is_small_without_dictionaries(self, path: Path, group: int) -> bool:
        """Whether the rows of a group without lists stay small, even if each has the largest value of a dictionary."""
        first_row = next(self._decode(path, group, num_rows=1, dictionaries=self._footer.byte_arrays))
        row_bytes = _largest_row(first_row)
        if row_bytes * self.rows_at_once > _MOST_REPEATED_BYTES:
            return False
        packed_bytes, all_bytes = self._footer.groups[group].packed_bytes, row_bytes * self.runs[group]
        return not expands_too_much(packed_bytes, all_bytes, allowed_bytes=_MOST_DECODED_BYTES)

    def _decode(self, path: Path, group: int, *, num_rows: int, dictionaries: list[str]) -> Iterator[pa.Array]:
        """Decode a row group, `num_rows` at a time; the leaves in `dictionaries` stay dictionaries."""
        options = {"read_dictionary": dictionaries, "buffer_size": _BUFFER_BYTES, "page_checksum_verification": True}
        with pq.ParquetFile(path, **options) as file:
            for batch in file.iter_batches(num_rows, [group], self._footer.columns, use_threads=False):
                yield one_array(batch, self._rows)


def _largest_row(column: pa.Array) -> int:
    """Give the bytes of a row with the largest value of each dictionary; a value is a text, or has no lists."""
    children = column.flatten() if pa.types.is_struct(column.type) else [column]
    dictionaries = [child.dictionary for child in children if isinstance(child, pa.DictionaryArray)]
    return sum(int(decoded_bytes(values).max(initial=0)) for values in dictionaries)


def _leaves(metadata: pq.FileMetaData, columns: list[str]) -> dict[int, pq.ColumnSchema]:
    """Give the leaves of some columns by number; a nested column has leaves such as messages.list.element.role."""
    leaves: dict[int, pq.ColumnSchema] = {}
    for number in range(metadata.num_columns):
        leaf = metadata.schema.column(number)
        column, *_ = leaf.path.split(".")
        # A column may have a dot in its own name.
        if leaf.path in columns or column in columns:
            leaves[number] = leaf
    return leaves


class _Group(NamedTuple):
    """The footer's description of a row group; the bytes are those of the leaves that are read."""

    num_rows: int
    first_byte: int
    packed_bytes: int
    decoded_bytes: int
    """Bytes of the group in memory, where a value of a dictionary counts once."""


class _Footer(NamedTuple):
    """The footer's description of all that is read of a file."""

    layout: Layout
    columns: list[str]
    """Columns that are read."""
    byte_arrays: list[str]
    """Paths of the leaves that Arrow can keep as dictionaries."""
    has_lists: bool
    """Whether a column holds lists."""
    groups: list[_Group]
    """Row groups in order."""


def _group_of(group: pq.RowGroupMetaData, leaves: list[int]) -> _Group:
    """Describe a row group, of which the leaves with these numbers are read."""
    chunks = [group.column(number) for number in leaves]
    first = group.column(0)
    return _Group(
        group.num_rows,
        int(first.dictionary_page_offset or first.data_page_offset),
        sum(chunk.total_compressed_size for chunk in chunks),
        # Each value has its place in memory, also where a million equal ones take a few bytes in the file.
        sum(chunk.total_uncompressed_size + VALUE_BYTES * chunk.num_values for chunk in chunks),
    )
