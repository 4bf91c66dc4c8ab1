"""Text files and JSON lines: an index of where rows begin, made once and cached.

A text file is one document, or several of about a mebibyte where it is larger.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hfdist.data.sources.base import (
    BadRow,
    ContentError,
    FileShard,
    Layout,
    check_size,
    decode_text,
    spans_of_part,
)
from hfdist.data.sources.columns import kinds_of
from hfdist.data.sources.messages import has_null_arguments
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.unpacked import CODECS, PIECE_BYTES, UnpackedFile, open_unpacked
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile, LocalFile

logger = logging.getLogger(__name__)

MOST_DOCUMENT_BYTES = 1 << 20
_BYTE_ORDER_MARK = "\ufeff"
_CONTINUATION = range(0x80, 0xC0)
_SAMPLED_ROWS, _SAMPLED_BYTES = 16, 1 << 20
_SHOWN_BYTES = 80


class _LinesShard(FileShard):
    """A file whose rows are read one by one; the layout has the first byte of each, and the end."""

    def __init__(
        self, file: DataFile, identity: str, cache: FileCache, layout: Layout | None, *, gives_examples: bool = False
    ) -> None:
        self._cache = cache
        self._codec = CODECS.get(Path(file.name).suffix)
        super().__init__(file, identity, layout, gives_examples=gives_examples)

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of rows."""
        with self._whole() as path, path.open("rb") as file:
            return [self._text(file, row) for row in rows]

    def rows_of_part(self, part: int) -> range | None:
        """Tell the rows; None: of a compressed file."""
        if self._codec is not None:
            return None
        first, stop = spans_of_part(self.layout.starts, self.file, part)
        return range(first, min(stop, self.runs[0]))

    @abstractmethod
    def _text(self, file: BinaryIO, row: int) -> str | BadRow: ...

    def _bytes(self, file: BinaryIO, row: int) -> bytes:
        start, stop = self._span(row)
        file.seek(start)
        return file.read(stop - start)

    def _span(self, row: int) -> tuple[int, int]:
        return int(self.layout.starts[row]), int(self.layout.starts[row + 1])

    def _whole(self) -> AbstractContextManager[Path]:
        """The file for reading anywhere: itself, or its unpacked form in the cache."""
        if self._codec is None:
            return self.file.local()
        if isinstance(self.file, LocalFile):
            self.file.check_unchanged()
        return self._cache.fetch(UnpackedFile(self.file, int(self.layout.starts[-1]), self._codec))


class TextShard(_LinesShard):
    """A file of UTF-8 text. `errors="replace"` takes undecodable bytes; "strict" refuses them."""

    def __init__(
        self,
        file: DataFile,
        identity: str,
        cache: FileCache,
        layout: Layout | None = None,
        *,
        errors: str = "strict",
    ) -> None:
        self._errors = errors
        super().__init__(file, identity, cache, layout)
        self.rows_at_once = 1

    def _find_layout(self) -> Layout:
        is_one = self.file.size_bytes <= MOST_DOCUMENT_BYTES
        starts = np.array([0, self.file.size_bytes]) if is_one else self._cached_index(self._cache.folder, self._index)
        return _layout_of_rows(starts)

    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        where, (start, _) = f"{self.file.url}, row {row}", self._span(row)
        text = decode_text(self._bytes(file, row), where=where, first_byte=start, errors=self._errors)
        return text.removeprefix(_BYTE_ORDER_MARK) if row == 0 and isinstance(text, str) else text

    def _index(self) -> NDArray[np.int64]:
        """Split after the last line end of each mebibyte; shape [rows + 1]."""
        starts = array("q", [0])
        with self.file.local() as path, path.open("rb") as file:
            while starts[-1] < self.file.size_bytes:
                file.seek(starts[-1])
                window = file.read(MOST_DOCUMENT_BYTES + 1)
                starts.append(starts[-1] + _length_of_part(window))
        return np.frombuffer(starts, dtype=np.int64)


class JsonLinesShard(_LinesShard):
    """A file of JSON objects, a line each. Blank lines are no rows."""

    def __init__(
        self, file: DataFile, identity: str, rows: RowReader, cache: FileCache, layout: Layout | None = None
    ) -> None:
        self._rows = rows
        super().__init__(file, identity, cache, layout, gives_examples=rows.gives_examples)

    def _find_layout(self) -> Layout:
        keys = self._rows.section, self._rows.columns_key
        return _layout_of_rows(self._cached_index(self._cache.folder, self._index, *keys))

    def _index(self) -> NDArray[np.int64]:
        """Find the lines, and check that the columns are in the first."""
        with open_unpacked(self.file, self._codec) as file:
            starts = _line_starts(file)
        with open_unpacked(self.file, self._codec) as file:
            head = file.read(_SAMPLED_BYTES)
        whole_rows = int(np.searchsorted(starts, len(head), side="right")) - 1
        self.layout = _layout_of_rows(starts[: max(min(whole_rows, _SAMPLED_ROWS), 0) + 1])
        objects = [self._object(io.BytesIO(head), row) for row in range(len(self.layout.starts) - 1)]
        sampled = [value for value in objects if isinstance(value, dict)]
        with suppress(RecursionError):
            if self.gives_examples and any(map(has_null_arguments, sampled)):
                _warn_of_nulls(str(Path(self.file.url).parent))
        if sampled:
            try:
                self._rows.columns(kinds_of(sampled), where=self.file.url)
            except ContentError:
                # A row that is no JSON says more than the columns of the rest.
                for value in objects:
                    if isinstance(value, BadRow):
                        raise value.error from None
                raise
        return starts

    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        value = self._object(file, row)
        if isinstance(value, BadRow):
            return value
        return self._rows.read(value, where=f"{self.file.url}, row {row}")

    def _object(self, file: BinaryIO, row: int) -> dict[str, object] | BadRow:
        start, stop = self._span(row)
        where = f"{self.file.url}, row {row}"
        too_large = check_size(stop - start, where=where)
        if too_large is not None:
            return too_large
        line = decode_text(self._bytes(file, row), where=where, first_byte=start)
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


def _layout_of_rows(starts: NDArray[np.int64]) -> Layout:
    return Layout(np.array([len(starts) - 1], dtype=np.int64), starts, int(starts[-1]))


@cache
def _warn_of_nulls(folder: str) -> None:
    """Warn once of a folder, which may have many files alike."""
    logger.warning(
        "%s: tool calls have arguments that are null, and they are learned. A table's `to_json` fills in arguments "
        "of other rows so: parquet in its place has none of them",
        folder,
    )


def _length_of_part(window: bytes) -> int:
    """Length of the next part: all that is left, or up to a line end, or else up to a whole character."""
    if len(window) <= MOST_DOCUMENT_BYTES:
        return len(window)
    after_line = window.rfind(b"\n", 0, MOST_DOCUMENT_BYTES) + 1
    if after_line:
        return after_line
    # At most four bytes are one character; more that do not begin one are no UTF-8.
    places = range(MOST_DOCUMENT_BYTES, MOST_DOCUMENT_BYTES - 4, -1)
    return next((place for place in places if window[place] not in _CONTINUATION), MOST_DOCUMENT_BYTES)


def _line_starts(file: io.BufferedReader) -> NDArray[np.int64]:
    """Give the first byte of each line that is not blank, and the end of the last one; shape [lines + 1]."""
    # An array: eight bytes a line, where a list takes forty.
    starts, place, line_start, is_blank = array("q"), 0, 0, True
    if file.peek().startswith(codecs.BOM_UTF8):
        place = line_start = len(file.read(len(codecs.BOM_UTF8)))
    # It reads pieces, because a file may be one line that is larger than memory.
    while piece := file.readline(PIECE_BYTES):
        if is_blank and not piece.isspace():
            starts.append(line_start)
            is_blank = False
        place += len(piece)
        if piece.endswith(b"\n"):
            line_start, is_blank = place, True
    # A blank line belongs to the row before it: JSON allows white space after a value.
    starts.append(place)
    return np.frombuffer(starts, dtype=np.int64)
