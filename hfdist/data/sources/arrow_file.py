"""Arrow files and streams, as `datasets` and feather write them: their record batches are indexed, and read in place.

    stream                   schema, batch, batch, ... end mark
    file        file mark,   schema, batch, batch, ... end mark,   footer

Dictionaries stand before the batches that use them. An index has the place of each batch, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from hfdist.data.sources.arrow_columns import check_schema, has_dictionary, make_text, one_array, texts_at
from hfdist.data.sources.base import BadRow, FileShard, Layout, damage
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile

_FILE_MARK = b"ARROW1\0\0"
"""Bytes at the start of a file."""
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
"""Bytes at the end of a stream."""


class _Opened(NamedTuple):
    """A mapped file, and a reader that reads the next batch from the place where the file stands."""

    source: pa.MemoryMappedFile
    reader: ipc.RecordBatchStreamReader
    is_in_order: bool
    """Whether batches must be read one after the other, since dictionaries may stand between them."""


class ArrowShard(FileShard):
    """The rows of one Arrow file. It is memory-mapped, so that only the columns that are read come from the disk."""

    def __init__(
        self, file: DataFile, identity: str, rows: RowReader, cache: FileCache, layout: Layout | None = None
    ) -> None:
        self._rows, self._cache = rows, cache
        super().__init__(file, identity, layout, gives_examples=rows.gives_examples)

    def _find_layout(self) -> Layout:
        starts, num_rows = self._cached_index(
            self._cache.folder, self._index, self._rows.section, self._rows.columns_key
        )
        return Layout(num_rows, starts, self.file.size_bytes)

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of rows, all of one record batch; a damaged batch gives bad rows."""
        batch, first = self._run_of(rows[0])
        try:
            with self.file.local() as path, self._open(path) as opened:
                found = _batch_at(int(self.layout.starts[batch]), opened)
                checked = pa.RecordBatch.from_arrays([_checked(column) for column in found.columns], found.schema.names)
                places = [row - first for row in rows]
                lazy_texts = texts_at(one_array(checked, self._rows), places, rows, self._rows, where=self.file.url)
                texts = [make_text(text) for text in lazy_texts]
        except (pa.ArrowException, OSError, EOFError, StopIteration, IndexError) as error:
            where = f"{self.file.url}, record batch {batch}"
            texts = [BadRow(damage("the file is damaged", error, where=where))] * len(rows)
        return texts

    def _index(self) -> NDArray[np.int64]:
        """Find the place in bytes of each record batch with rows, and its number of rows; shape [2, batches]."""
        starts, sizes = list[int](), list[int]()
        try:
            with self.file.local() as path, self._open(path) as (source, reader, _):
                place = source.tell()
                for batch in reader:
                    if batch.num_rows:
                        starts.append(place)
                        sizes.append(batch.num_rows)
                    place = source.tell()
                # A stream that is cut between two batches looks as if it ended there.
                source.seek(place)
                if source.read(len(_END_MARK)) != _END_MARK:
                    raise EOFError("it ends before its end mark")
        except (pa.ArrowException, OSError, EOFError) as error:
            raise damage("not a whole arrow file", error, where=self.file.url) from error
        return np.array([starts, sizes], dtype=np.int64)

    @contextmanager
    def _open(self, path: Path) -> Iterator[_Opened]:
        """Map the file, and open a reader of the columns that are read."""
        with pa.memory_map(str(path)) as source:
            start = len(_FILE_MARK) if source.read(len(_FILE_MARK)) == _FILE_MARK else 0
            source.seek(start)
            schema = ipc.read_schema(source)
            columns = check_schema(schema, self._rows, where=self.file.url)
            places = [schema.names.index(name) for name in columns]
            source.seek(start)
            reader = ipc.open_stream(source, options=ipc.IpcReadOptions(included_fields=places))
            # All columns count: a stream has the dictionaries of those that are not read, too.
            yield _Opened(source, reader, is_in_order=any(has_dictionary(kind) for kind in schema.types))


def _batch_at(offset: int, opened: _Opened) -> pa.RecordBatch:
    """Read the record batch at an offset of the file, in bytes."""
    if not opened.is_in_order:
        opened.source.seek(offset)
    while opened.source.tell() < offset:
        opened.reader.read_next_batch()
    return opened.reader.read_next_batch()


def _checked(column: pa.Array) -> pa.Array:
    """Give the column once its offsets are known to lie inside its buffers: Arrow itself trusts them."""
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    # Texts are checked as bytes, because one row that is no UTF-8 does not spoil the others.
    as_bytes = column.view(binary[column.type]) if column.type in binary else column
    as_bytes.validate(full=True)
    return column
