"""Parquet files: row counts from the footer, rows from row groups that are kept decoded while memory allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hfdist.data.files import identify
from hfdist.data.sources.base import check_column, check_text
from hfdist.errors import DataError


class DecodedGroups:
    """Decoded row groups of all files of a source, the least recently used dropped beyond a number of bytes.

    Lanes take turns, each in a row group of its own, so keeping only the last one would decode one for every row.
    """

    def __init__(self, limit_bytes: int = 512 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._groups: OrderedDict[tuple[Path, int], pa.ChunkedArray] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: tuple[Path, int], decode: Callable[[], pa.ChunkedArray]) -> pa.ChunkedArray:
        """Give the group of `key`, decoded now unless it is kept."""
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        group = decode()
        self._groups[key] = group
        self._num_bytes += group.nbytes
        while self._num_bytes > self._limit_bytes and len(self._groups) > 1:
            self._num_bytes -= self._groups.popitem(last=False)[1].nbytes
        return group


class ParquetShard:
    """One file. Only the text column is ever read."""

    def __init__(self, path: Path, name: str, column: str, decoded: DecodedGroups) -> None:
        self.name = name
        self.identity = identify(path, column)
        self._path, self._column, self._decoded = path, column, decoded
        try:
            # The handle is not kept: workers are forked, and would share its position.
            metadata = pq.read_metadata(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"not a whole parquet file: {_first_line(error)}", where=str(path)) from error
        check_column(column, metadata.schema.to_arrow_schema().names, where=str(path))
        kind = metadata.schema.to_arrow_schema().field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError("the text column holds no text", where=f"{path}, column {column}", found=str(kind))
        self.runs: Sequence[int] = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]

    def read(self, row: int) -> str:
        """Give a row of the text column."""
        group, inside = 0, row
        while inside >= self.runs[group]:
            inside -= self.runs[group]
            group += 1
        rows = self._decoded.get((self._path, group), lambda: self._decode(group))
        return check_text(rows[inside].as_py(), where=f"{self._path}, row {row}")

    def _decode(self, group: int) -> pa.ChunkedArray:
        try:
            with pq.ParquetFile(self._path) as file:
                return file.read_row_group(group, columns=[self._column], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"the file is damaged: {_first_line(error)}", where=f"{self._path}, row group {group}"
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
