"""Parquet files: row counts from the footer, neighbouring rows decoded together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hfdist.data.files import identify
from hfdist.data.sources.base import check_column, check_text
from hfdist.errors import DataError

# What each lane may hold of its block. Lanes take turns in row groups of their own, so a shared cache of decoded row
# groups would need room for all of them, and those of many writers hold a million rows.
_HELD_BYTES = 2 << 20
_MOST_ROWS = 1024
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20


class ParquetShard:
    """One file. Only the text column is ever read, and never more of it than up to the last row asked for."""

    def __init__(self, path: Path, name: str, column: str) -> None:
        self.name = name
        self.identity = identify(path, column)
        self._path, self._column = path, column
        try:
            # The handle is not kept: workers are forked, and would share its position.
            metadata = pq.read_metadata(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"not a whole parquet file: {_first_line(error)}", where=str(path)) from error
        schema = metadata.schema.to_arrow_schema()
        check_column(column, schema.names, where=str(path))
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError("the text column holds no text", where=f"{path}, column {column}", found=str(kind))
        self.runs: Sequence[int] = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        self._ends = np.cumsum(np.array(self.runs, dtype=np.int64))
        row_bytes = _text_bytes(metadata, column) / max(metadata.num_rows, 1)
        self.rows_at_once = min(max(int(_HELD_BYTES / max(row_bytes, 1)), 1), _MOST_ROWS)

    def read(self, rows: Sequence[int]) -> list[str]:
        """Give rows of the text column; all in one row group."""
        group = int(np.searchsorted(self._ends, rows[0], side="right"))
        first = int(self._ends[group]) - self.runs[group]
        # Decoded once in the order of the file, then handed out as asked.
        wanted = np.array(sorted(rows), dtype=np.int64) - first
        texts: dict[int, str] = {}
        start = 0
        for batch in self._decode(group, last=int(wanted[-1])):
            inside = wanted[(wanted >= start) & (wanted < start + len(batch))]
            for row, value in zip(inside.tolist(), batch.take(pa.array(inside - start)), strict=True):
                texts[first + row] = self._text(value, first + row)
            start += len(batch)
        return [texts[row] for row in rows]

    def _text(self, value: pa.Scalar, row: int) -> str:
        where = f"{self._path}, row {row}"
        try:
            return check_text(value.as_py(), where=where)
        except UnicodeDecodeError as error:
            raise DataError("not UTF-8", where=where, found=error.object[error.start : error.end]) from error

    def _decode(self, group: int, *, last: int) -> Iterator[pa.Array]:
        """Give the text column of a row group in pieces, up to the one that holds row `last` of the group."""
        try:
            with pq.ParquetFile(self._path, buffer_size=_BUFFER_BYTES) as file:
                num_rows = 0
                for batch in file.iter_batches(_BATCH_ROWS, [group], [self._column], use_threads=False):
                    yield batch.column(0)
                    num_rows += len(batch)
                    if num_rows > last:
                        return
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"the file is damaged: {_first_line(error)}", where=f"{self._path}, row group {group}"
            ) from error


def _text_bytes(metadata: pq.FileMetaData, column: str) -> int:
    """Size of the text column when it is decompressed, as the footer tells."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if not groups:
        return 0
    paths = [groups[0].column(index).path_in_schema for index in range(groups[0].num_columns)]
    place = paths.index(column)
    return sum(group.column(place).total_uncompressed_size for group in groups)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
