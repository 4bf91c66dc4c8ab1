"""JSON lines: an index of line starts, made once and cached; compressed files are unpacked once."""

from __future__ import annotations

import codecs
import io
import json
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hfdist.data.sources.base import (
    BadRow,
    ContentError,
    check_size,
    decode_text,
    local_identity,
    rows_held_at_once,
    spans_of_part,
    uncompared,
)
from hfdist.data.sources.rowindex import cached_index
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.unpack import is_packed, open_unpacked, whole_unpacked
from hfdist.data.storage.datafile import DataFile
from hfdist.data.storage.filecache import FileCache

_PIECE_BYTES = 1 << 20
_SAMPLED_ROWS = 16
_SAMPLED_BYTES = 1 << 20
_SHOWN_BYTES = 80


class JsonLinesShard:
    """One file of JSON objects, a line each. Blank lines are no rows."""

    def __init__(self, file: DataFile, identity: str, rows: RowReader, cache: FileCache) -> None:
        self.name = file.name
        self.identity, self.local_identity = identity, local_identity(identity, file)
        self.contents, self.place = file.contents, uncompared(file)
        self._file, self._rows, self._cache = file, rows, cache
        self.gives_examples = rows.gives_examples
        self._starts = cached_index(cache.folder, file, identity, self._index)
        self.runs: Sequence[int] = [len(self._starts) - 1]
        self.rows_at_once = rows_held_at_once(int(self._starts[-1]), self.runs[0])

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of lines."""
        with whole_unpacked(self._file, int(self._starts[-1]), self._cache) as path, path.open("rb") as file:
            return [self._text(file, row) for row in rows]

    def rows_of_part(self, part: int) -> range | None:
        """Tell the lines; None: of a compressed file."""
        if is_packed(self._file):
            return None
        first, stop = spans_of_part(self._starts, self._file, part)
        return range(first, min(stop, self.runs[0]))

    def _index(self) -> NDArray[np.int64]:
        """Find the lines, and check that the columns are in the first."""
        with open_unpacked(self._file) as file:
            self._starts = _line_starts(file)
        with open_unpacked(self._file) as file:
            head = file.read(_SAMPLED_BYTES)
        whole_rows = int(np.searchsorted(self._starts, len(head), side="right")) - 1
        objects = [self._object(io.BytesIO(head), row) for row in range(min(whole_rows, _SAMPLED_ROWS))]
        sampled = [value for value in objects if isinstance(value, dict)]
        if sampled:
            self._rows.columns(list(dict.fromkeys(name for value in sampled for name in value)), where=self._file.url)
        return self._starts

    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        value = self._object(file, row)
        if isinstance(value, BadRow):
            return value
        return self._rows.read(value, where=f"{self._file.url}, row {row}")

    def _object(self, file: BinaryIO, row: int) -> dict[str, Any] | BadRow:
        start, stop = int(self._starts[row]), int(self._starts[row + 1])
        where = f"{self._file.url}, row {row}"
        too_large = check_size(stop - start, where=where)
        if too_large is not None:
            return too_large
        file.seek(start)
        line = decode_text(file.read(stop - start), where=where, first_byte=start)
        if isinstance(line, BadRow):
            return line
        where = f"{where}, byte {start} of the text"
        try:
            value = json.loads(line)
        # Too deep a nesting, and a number of too many digits, which is another ValueError.
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            return BadRow(ContentError(f"not JSON: {reason}", where=where, found=line[:_SHOWN_BYTES]))
        if not isinstance(value, dict):
            found = line[:_SHOWN_BYTES]
            return BadRow(
                ContentError("a line is not a JSON object", where=where, found=found, allowed='{"text": ...}')
            )
        return value


def _line_starts(file: io.BufferedReader) -> NDArray[np.int64]:
    """Give the first byte of each line that is not blank, and the end behind them; shape [lines + 1]."""
    # An array: eight bytes a line, where a list takes forty.
    starts, place, line_start, is_blank = array("q"), 0, 0, True
    if file.peek().startswith(codecs.BOM_UTF8):
        place = line_start = len(file.read(len(codecs.BOM_UTF8)))
    # In pieces, because a file may be one line that is larger than memory.
    while piece := file.readline(_PIECE_BYTES):
        if is_blank and not piece.isspace():
            starts.append(line_start)
            is_blank = False
        place += len(piece)
        if piece.endswith(b"\n"):
            line_start, is_blank = place, True
    # A blank line belongs to the row before it: JSON allows white space behind a value.
    starts.append(place)
    return np.frombuffer(starts, dtype=np.int64)
