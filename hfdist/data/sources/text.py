"""Text files: one document each, or several of about a mebibyte where they are larger."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hfdist.data.sources.base import BadRow, decode_text, local_identity, spans_of_part, uncompared
from hfdist.data.sources.rowindex import cached_index
from hfdist.data.storage.datafile import DataFile
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.verified_file import whole_file

MOST_DOCUMENT_BYTES = 1 << 20
_BYTE_ORDER_MARK = "\ufeff"
_CONTINUATION = range(0x80, 0xC0)


class TextShard:
    """A file of UTF-8 text. `errors="replace"` takes undecodable bytes; "strict" refuses them."""

    def __init__(self, file: DataFile, identity: str, cache: FileCache, *, errors: str = "strict") -> None:
        self.name = file.name
        self.identity, self.local_identity = identity, local_identity(identity, file)
        self.contents, self.place = file.contents, uncompared(file)
        self.rows_at_once, self.gives_examples = 1, False
        self._file, self._errors = file, errors
        if file.size_bytes <= MOST_DOCUMENT_BYTES:
            self._starts = np.array([0, file.size_bytes], dtype=np.int64)
        else:
            self._starts = cached_index(cache.folder, file, identity, self._index)
        self.runs: Sequence[int] = (len(self._starts) - 1,)

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give parts of the file, by their numbers."""
        with whole_file(self._file) as path, path.open("rb") as file:
            return [self._text(file, row) for row in rows]

    def rows_of_part(self, part: int) -> range:
        """Tell the documents."""
        first, stop = spans_of_part(self._starts, self._file, part)
        return range(first, min(stop, self.runs[0]))

    def _text(self, file: BinaryIO, row: int) -> str | BadRow:
        start, stop = int(self._starts[row]), int(self._starts[row + 1])
        file.seek(start)
        data = file.read(stop - start)
        text = decode_text(data, where=f"{self._file.url}, row {row}", first_byte=start, errors=self._errors)
        return text.removeprefix(_BYTE_ORDER_MARK) if row == 0 and isinstance(text, str) else text

    def _index(self) -> NDArray[np.int64]:
        """Cut behind the last line end of each mebibyte; shape [rows + 1]."""
        starts = array("q", [0])
        with whole_file(self._file) as path, path.open("rb") as file:
            while starts[-1] < self._file.size_bytes:
                file.seek(starts[-1])
                window = file.read(MOST_DOCUMENT_BYTES + 1)
                starts.append(starts[-1] + _cut(window))
        return np.frombuffer(starts, dtype=np.int64)


def _cut(window: bytes) -> int:
    """Length of the next part: all that is left, or up to a line end, or else up to a whole character."""
    if len(window) <= MOST_DOCUMENT_BYTES:
        return len(window)
    cut = window.rfind(b"\n", 0, MOST_DOCUMENT_BYTES) + 1
    if cut:
        return cut
    # At most four bytes are one character; more that do not begin one are no UTF-8.
    places = range(MOST_DOCUMENT_BYTES, MOST_DOCUMENT_BYTES - 4, -1)
    return next((place for place in places if window[place] not in _CONTINUATION), MOST_DOCUMENT_BYTES)
