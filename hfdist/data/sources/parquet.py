"""Parquet files: row counts from the footer, neighbouring rows decoded together."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hfdist.data.sources.base import BadRow, ContentError, FileShard, damage, expands_too_much, rows_held_at_once
from hfdist.data.sources.columns import Lazy, check_schema, made, one_array, texts_at
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.files import DataFile

_BUFFER_BYTES = 1 << 20
# A small corpus is read in blocks that are much smaller than its row groups, in a mixed order.
_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 4 << 20, 64 << 20
_VALUE_BYTES = 8


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

    def __init__(self, file: DataFile, identity: str, rows: RowReader) -> None:
        super().__init__(file, identity, gives_examples=rows.gives_examples)
        self._rows = rows
        try:
            # The handle is not kept: workers are forked, and would share its position.
            with file.open() as opened:
                metadata = pq.read_metadata(opened)
            schema = metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise damage("not a whole parquet file", error, where=file.url) from error
        self._columns = check_schema(schema, rows, where=file.url)
        leaves = _leaves(metadata, self._columns)
        # As dictionaries, because one value of a small file can stand for a million. Other types have none in Arrow.
        self._dictionaries = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        group_bytes = _column_bytes(metadata, leaves)
        packed_bytes, text_bytes = sum(size for size, _ in group_bytes), sum(size for _, size in group_bytes)
        if expands_too_much(packed_bytes, text_bytes):
            raise ContentError(
                "what is read of it expands beyond reason",
                where=f"{file.url}, column {', '.join(self._columns)}",
                found=f"{packed_bytes:,} bytes that become {text_bytes:,}",
            )
        self.runs: Sequence[int] = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        self._starts = np.array([_first_byte(metadata.row_group(index)) for index in range(metadata.num_row_groups)])
        self._decoded_bytes = [in_memory for _, in_memory in group_bytes]
        self.rows_at_once = rows_held_at_once(text_bytes, metadata.num_rows)

    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of rows; all in one row group. Examples are decoded one by one, as they are taken.

        Behind a damaged place of a row group all rows are bad, those before it are not, whatever is asked together.
        """
        group, first = self._run_of(rows[0])
        with self._file.local() as path:
            texts, missing = self._decode_rows(path, group, first, sorted(rows))
        found = (made(texts.get(row, missing)) for row in rows)
        return found if self.gives_examples else list(found)

    def _decode_rows(self, path: Path, group: int, first: int, rows: list[int]) -> tuple[dict[int, Lazy], BadRow]:
        """Decode in the order of the file; also give what stands for rows that are not in the result."""
        wanted = np.array(rows, dtype=np.int64) - first
        texts: dict[int, Lazy] = {}
        start, where = 0, f"{self._file.url}, row group {group}"
        missing = ContentError("the file is damaged: it ends before its last row", where=where)
        try:
            for column in self._arrays(path, group):
                inside = wanted[(wanted >= start) & (wanted < start + len(column))] - start
                found = (inside + first + start).tolist()
                read = texts_at(column, inside.tolist(), found, self._rows, where=self._file.url)
                texts.update(zip(found, read, strict=True))
                start += len(column)
                if start > wanted[-1]:
                    break
        except (pa.ArrowException, OSError) as error:
            missing = damage("the file is damaged", error, where=where)
        return texts, BadRow(missing)

    def _arrays(self, path: Path, group: int) -> Iterator[pa.Array]:
        kept = recent.get(self, group)
        if kept is None and self._decoded_bytes[group] <= _LARGEST_KEPT_BYTES:
            # A damaged one is decoded row by row below, up to the damage.
            with contextlib.suppress(pa.ArrowException, OSError):
                # Together: each batch would hold a dictionary of its own.
                kept = list(self._decode(path, group, num_rows=self.runs[group]))
                recent.put(self, group, kept)
        yield from self._decode(path, group, num_rows=self.rows_at_once) if kept is None else kept

    def _decode(self, path: Path, group: int, *, num_rows: int) -> Iterator[pa.Array]:
        options = {
            "read_dictionary": self._dictionaries,
            "buffer_size": _BUFFER_BYTES,
            "page_checksum_verification": True,
        }
        with pq.ParquetFile(path, **options) as file:
            for batch in file.iter_batches(num_rows, [group], self._columns, use_threads=False):
                yield one_array(batch, self._rows)


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return int(column.dictionary_page_offset or column.data_page_offset)


class _Leaf(NamedTuple):
    """What is stored of a column: of a nested one each value by itself, such as messages.list.element.role."""

    number: int
    path: str
    physical_type: str


def _leaves(metadata: pq.FileMetaData, columns: list[str]) -> list[_Leaf]:
    """Those of some columns."""
    every = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    leaves = [_Leaf(number, column.path, column.physical_type) for number, column in enumerate(every)]
    return [leaf for leaf in leaves if leaf.path in columns or leaf.path.split(".")[0] in columns]


def _column_bytes(metadata: pq.FileMetaData, leaves: list[_Leaf]) -> list[tuple[int, int]]:
    """Size of leaves in the file and in memory, of each row group, as the footer tells."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [[group.column(leaf.number) for leaf in leaves] for group in groups]
    return [
        (
            sum(chunk.total_compressed_size for chunk in own),
            # Each value has its place in memory, also where a million equal ones take a few bytes in the file.
            sum(chunk.total_uncompressed_size + _VALUE_BYTES * chunk.num_values for chunk in own),
        )
        for own in chunks
    ]
