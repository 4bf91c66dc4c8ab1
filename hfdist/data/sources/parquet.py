"""Parquet files: row counts from the footer, rows from the row group that was decoded last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hfdist.data.files import identify
from hfdist.data.sources.base import check_column, check_text
from hfdist.errors import DataError


class ParquetShard:
    """One file. Only the text column is ever read."""

    def __init__(self, path: Path, name: str, column: str) -> None:
        self.name = name
        self.identity = identify(path, column)
        self._path, self._column = path, column
        self._decoded: tuple[int, pa.ChunkedArray] | None = None
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
        return check_text(self._group(group)[inside].as_py(), where=f"{self._path}, row {row}")

    def _group(self, group: int) -> pa.ChunkedArray:
        if self._decoded is None or self._decoded[0] != group:
            try:
                with pq.ParquetFile(self._path) as file:
                    table = file.read_row_group(group, columns=[self._column], use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"the file is damaged: {_first_line(error)}", where=f"{self._path}, row group {group}"
                ) from error
            self._decoded = (group, table.column(0))
        return self._decoded[1]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
