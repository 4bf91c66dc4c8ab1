"""Text files and JSON lines, whose rows are found by an index of their first bytes, which is made once and cached.

A small text file is one document. A larger one is cut into documents of at most a mebibyte.
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
"""Bytes of the largest document of a text file."""
_BYTE_ORDER_MARK = "\ufeff"
_CONTINUATION = range(0x80, 0xC0)
"""Bytes of UTF-8 that do not begin a character."""
_SAMPLED_ROWS, _SAMPLED_BYTES = 16, 1 << 20
"""Rows at the beginning of JSON lines by which the columns are checked, and the bytes in which they are looked for."""
_SHOWN_CHARACTERS = 80


class _LinesShard(FileShard):
    """A file whose rows are read one by one: the layout has the first byte of each row, and the end of the last."""

    def __init__(
        self, file: DataFile, identity: str, cache: FileCache, layout: Layout | None, *, gives_examples: bool = False
    ) -> None:
        self._cache = cache
        self._codec = CODECS.get(Path(file.name).suffix)
        super().__init__(file, identity, layout, gives_examples=gives_examples)

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of rows, in the order asked for."""
        with self._whole() as path, path.open("rb") as file:
            return [self._text(file, row) for row in rows]

    def rows_of_part(self, part: int) -> range | None:
        """Give the rows of which something lies in a part of `contents`; None: the file is compressed."""
        if self._codec is not None:
            return None
        first, stop = spans_of_part(self.layout.starts, self.file, part)
        return range(first, min(stop, self.runs[0]))

    @abstractmethod
    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        """Read the text of a row from the open file."""

    def _bytes(self, file: BinaryIO, row: int) -> bytes:
        start, stop = self._span(row)
        file.seek(start)
        return file.read(stop - start)

    def _span(self, row: int) -> tuple[int, int]:
        """Give the first byte of a row, and the byte after its last one."""
        return int(self.layout.starts[row]), int(self.layout.starts[row + 1])

    def _whole(self) -> AbstractContextManager[Path]:
        """Give the path of the file, or of its unpacked form in the cache, so that it can be read at any place."""
        if self._codec is None:
            return self.file.local()
        if isinstance(self.file, LocalFile):
            self.file.check_unchanged()
        return self._cache.fetch(UnpackedFile(self.file, int(self.layout.starts[-1]), self._codec))


class TextShard(_LinesShard):
    """The documents of a file of UTF-8 text; bytes that are not UTF-8 make a row bad, or are replaced (`errors`)."""

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
        if self.file.size_bytes <= MOST_DOCUMENT_BYTES:
            return _layout_of_rows(np.array([0, self.file.size_bytes]))
        return _layout_of_rows(self._cached_index(self._cache.folder, self._index))

    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        where = f"{self.file.url}, row {row}"
        start, _ = self._span(row)
        text = decode_text(self._bytes(file, row), where=where, first_byte=start, errors=self._errors)
        if row == 0 and isinstance(text, str):
            return text.removeprefix(_BYTE_ORDER_MARK)
        return text

    def _index(self) -> NDArray[np.int64]:
        """Cut the file after the last line end of each mebibyte; give the first byte of each document, and the end."""
        starts = array("q", [0])
        with self.file.local() as path, path.open("rb") as file:
            while starts[-1] < self.file.size_bytes:
                file.seek(starts[-1])
                window = file.read(MOST_DOCUMENT_BYTES + 1)
                starts.append(starts[-1] + _length_of_part(window))
        return np.frombuffer(starts, dtype=np.int64)


class JsonLinesShard(_LinesShard):
    """The rows of a file of JSON objects, a line each. Blank lines are no rows."""

    def __init__(
        self, file: DataFile, identity: str, rows: RowReader, cache: FileCache, layout: Layout | None = None
    ) -> None:
        self._rows = rows
        super().__init__(file, identity, cache, layout, gives_examples=rows.gives_examples)

    def _find_layout(self) -> Layout:
        # The hint of an error may name these two keys.
        section, columns_key = self._rows.section, self._rows.columns_key
        return _layout_of_rows(self._cached_index(self._cache.folder, self._index, section, columns_key))

    def _index(self) -> NDArray[np.int64]:
        """Find the first byte of each line, and the end; check that the first lines have the columns that are read."""
        with open_unpacked(self.file, self._codec) as file:
            starts = _line_starts(file)
        with open_unpacked(self.file, self._codec) as file:
            head = file.read(_SAMPLED_BYTES)
        num_whole = int(np.searchsorted(starts, len(head), side="right")) - 1
        num_sampled = max(min(num_whole, _SAMPLED_ROWS), 0)
        # Rows are read by the layout, which is not there yet: until it is, it has the sampled rows alone.
        self.layout = _layout_of_rows(starts[: num_sampled + 1])
        self._check_sample([self._object(io.BytesIO(head), row) for row in range(num_sampled)])
        return starts

    def _check_sample(self, objects: Sequence[dict[str, object] | BadRow]) -> None:
        """Raise a ContentError where the columns of some rows are not those that are read; warn of filled-in nulls."""
        sampled = [value for value in objects if isinstance(value, dict)]
        # A row may be nested too deep to be searched for nulls.
        with suppress(RecursionError):
            if self.gives_examples and any(map(has_null_arguments, sampled)):
                _warn_of_nulls(str(Path(self.file.url).parent))
        if not sampled:
            return
        try:
            self._rows.columns(kinds_of(sampled), where=self.file.url)
        except ContentError:
            # A row that is no JSON says more than the columns of the rest.
            for value in objects:
                if isinstance(value, BadRow):
                    raise value.error from None
            raise

    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        value = self._object(file, row)
        if isinstance(value, BadRow):
            return value
        return self._rows.read(value, where=f"{self.file.url}, row {row}")

    def _object(self, file: BinaryIO, row: int) -> dict[str, object] | BadRow:
        """Read the JSON object of a row from the open file."""
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
        # RecursionError: too deep a nesting. ValueError: no JSON, or a number of too many digits.
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            return BadRow(ContentError(f"not JSON: {reason}", where=where, found=line[:_SHOWN_CHARACTERS]))
        if not isinstance(value, dict):
            found = line[:_SHOWN_CHARACTERS]
            return BadRow(
                ContentError("a line is not a JSON object", where=where, found=found, allowed='{"text": ...}')
            )
        return value


def _layout_of_rows(starts: NDArray[np.int64]) -> Layout:
    """Make the layout of a file with one run of rows; `starts` has shape [rows + 1]."""
    return Layout(np.array([len(starts) - 1], dtype=np.int64), starts, int(starts[-1]))


@cache
def _warn_of_nulls(folder: str) -> None:
    """Warn of null arguments once in a folder, which may have many files alike."""
    logger.warning(
        "%s: tool calls have arguments that are null, and they are learned. A table's `to_json` fills in arguments "
        "of other rows so: parquet in its place has none of them",
        folder,
    )


def _length_of_part(window: bytes) -> int:
    """Give the length of the next document: all of the window, or up to a line end, or else to a whole character."""
    if len(window) <= MOST_DOCUMENT_BYTES:
        return len(window)
    after_line = window.rfind(b"\n", 0, MOST_DOCUMENT_BYTES) + 1
    if after_line:
        return after_line
    # A character has at most four bytes: with more that do not begin one, the text is no UTF-8.
    places = range(MOST_DOCUMENT_BYTES, MOST_DOCUMENT_BYTES - 4, -1)
    for place in places:
        if window[place] not in _CONTINUATION:
            return place
    return MOST_DOCUMENT_BYTES


def _line_starts(file: io.BufferedReader) -> NDArray[np.int64]:
    """Give the first byte of each line that is not blank, and the end of the last one; shape [lines + 1]."""
    # An array takes eight bytes a line, where a list takes forty.
    starts = array("q")
    place, line_start = 0, 0
    # Whether all of the line so far is white space.
    is_blank = True
    if file.peek().startswith(codecs.BOM_UTF8):
        place = line_start = len(file.read(len(codecs.BOM_UTF8)))
    # Lines are read in pieces, because a file may be one line that is larger than memory.
    while piece := file.readline(PIECE_BYTES):
        if is_blank and not piece.isspace():
            starts.append(line_start)
            is_blank = False
        place += len(piece)
        if piece.endswith(b"\n"):
            line_start = place
            is_blank = True
    # A blank line belongs to the row before it: JSON allows white space after a value.
    starts.append(place)
    return np.frombuffer(starts, dtype=np.int64)
