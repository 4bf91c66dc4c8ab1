"""Arrow and Parquet files: columns in Arrow's memory, types checked, values decoded one by one."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray
from pyarrow import ipc

from hfdist.data.sources.base import (
    BadRow,
    ContentError,
    FileShard,
    check_size,
    check_text,
    damage,
    decode_text,
    expands_too_much,
    rows_held_at_once,
)
from hfdist.data.sources.columns import Column, Kind
from hfdist.data.sources.formats import without_nulls
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile
from hfdist.errors import first_line

_VALUE_BYTES = 8


def check_schema(schema: pa.Schema, rows: RowReader, *, where: str) -> list[str]:
    """Give the columns that are read, in the order of the file; ContentError where none are there, or none of text."""
    columns = rows.columns({field.name: _kind_of(field.type) for field in schema}, where=where)
    return columns if rows.gives_examples else [_text_place(schema, rows.text, where)[0]]


def _text_place(schema: pa.Schema, text: Column, where: str = "") -> tuple[str, ...]:
    """Give the column of texts, and the names within it; ContentError: none is there, or it holds no text."""
    refused: list[ContentError] = []
    for place in text.places(schema.names):
        kind, found = schema.field(place[0]).type, f"{where}, column {place[0]}"
        for name in place[1:]:
            is_inside = pa.types.is_struct(kind) and kind.get_field_index(name) >= 0
            if not is_inside:
                inside = ", ".join(field.name for field in kind) if pa.types.is_struct(kind) else "none within it"
                refused.append(ContentError(f"there is no column {text}", where=found, allowed=inside))
                break
            kind = kind.field(name).type
        else:
            if is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
                return place
            refused.append(ContentError("the text column holds no text", where=found, found=str(kind)))
    raise refused[0]


def _kind_of(kind: pa.DataType) -> Kind:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_text(kind):
        return Kind.text
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return Kind.flag
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return Kind.turns if is_list and pa.types.is_struct(kind.value_type) else Kind.other


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def one_array(batch: pa.RecordBatch, rows: RowReader) -> pa.Array:
    """Give what is read of some rows, as one array for `texts_at`."""
    if rows.gives_examples:
        return batch.to_struct_array()
    column = batch.column(0)
    for name in _text_place(batch.schema, rows.text)[1:]:
        column = pc.struct_field(column, name)
    return column


Lazy = str | BadRow | Callable[[], str | BadRow]
"""A text, or what makes it: examples are made one by one, as a thousand that share one value are large as texts."""


def made(text: Lazy) -> str | BadRow:
    """Give the text itself."""
    return text() if callable(text) else text


def texts_at(
    column: pa.Array, places: Sequence[int], numbers: Sequence[int], rows: RowReader, *, where: str
) -> Sequence[Lazy]:
    """Decode some values of `one_array`, which are rows of those numbers of what `where` names."""
    if not rows.gives_examples:
        return _plain_texts(column, places, numbers, where)
    taken = column.take(pa.array(places, pa.int64()))
    sizes = _decoded_bytes(taken).tolist()
    return [
        partial(_example, taken, place, sizes[place], rows, f"{where}, row {number}")
        for place, number in enumerate(numbers)
    ]


def _example(column: pa.Array, place: int, size_bytes: int, rows: RowReader, where: str) -> str | BadRow:
    too_large = check_size(size_bytes, where=where)
    if too_large is not None:
        return too_large
    try:
        row = column[place].as_py()
    # Nested values are decoded by Arrow, which says no more than that.
    except (ValueError, OverflowError) as error:
        return BadRow(ContentError(f"the row cannot be decoded: {first_line(error)}", where=where))
    return rows.read(without_nulls(row), where=where)


def _decoded_bytes(array: pa.Array) -> NDArray[np.int64]:
    """Bytes that the parts of each value take once decoded: those of texts, and a few for all else. Shape [values].

    Values of a dictionary count for each time that they are used.
    """
    kind = array.type
    if isinstance(array, pa.DictionaryArray):
        sizes = np.append(_decoded_bytes(array.dictionary), _VALUE_BYTES)
        # Nulls are told as the last one.
        return sizes[array.indices.fill_null(len(sizes) - 1).to_numpy(zero_copy_only=False)]
    if pa.types.is_struct(kind):
        return sum((_decoded_bytes(child) for child in array.flatten()), np.full(len(array), _VALUE_BYTES))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        before = np.concatenate([[0], np.cumsum(_decoded_bytes(array.flatten()))])
        return before[ends] - before[ends - lengths] + _VALUE_BYTES
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64) + _VALUE_BYTES
    return np.full(len(array), _VALUE_BYTES)


def _plain_texts(column: pa.Array, places: Sequence[int], rows: Sequence[int], where: str) -> list[Lazy]:
    values, keys = column, places
    if isinstance(column, pa.DictionaryArray):
        # A thousand rows may share one value of many megabytes: it is decoded once.
        values, keys = column.dictionary, column.indices.take(pa.array(places, pa.int64())).to_pylist()
    shared: dict[int | None, str] = {}
    texts: list[Lazy] = []
    for row, key in zip(rows, keys, strict=True):
        text = shared.get(key) or _text(None if key is None else values[key], f"{where}, row {row}")
        if isinstance(text, str):
            shared[key] = text
        texts.append(text)
    return texts


def hash_table(table: pa.Table) -> int:
    """XXH3 of values, however they are cut into chunks and whatever the width of their offsets."""
    hashed = xxhash.xxh3_64()
    for name, column in zip(table.column_names, table.columns, strict=True):
        hashed.update(name.encode())
        _hash_array(column.combine_chunks(), hashed)
    return hashed.intdigest()


def _hash_array(array: pa.Array, hashed: xxhash.xxh3_64) -> None:
    hashed.update(array.is_valid().to_numpy(zero_copy_only=False).tobytes())
    present, kind = array.drop_null(), array.type
    if pa.types.is_struct(kind):
        for child in present.flatten():
            _hash_array(child, hashed)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        hashed.update(pc.list_value_length(present).cast(pa.int64()).to_numpy().tobytes())
        _hash_array(present.flatten(), hashed)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        present = present.cast(pa.large_binary())
        ends = np.frombuffer(present.buffers()[1], np.int64)[present.offset : present.offset + len(present) + 1]
        hashed.update(np.diff(ends).tobytes())
        if len(present):
            hashed.update(memoryview(present.buffers()[2])[ends[0] : ends[-1]])
    else:
        hashed.update(json.dumps(present.to_pylist(), default=str).encode())


def _text(value: pa.Scalar | None, where: str) -> str | BadRow:
    if value is None or not value.is_valid:
        return check_text(None, where=where)
    data = memoryview(value.as_buffer())
    return check_size(data.nbytes, where=where) or decode_text(data, where=where)


# A file is a stream between a mark of eight bytes and a footer.
_FILE_MARK = b"ARROW1\0\0"
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowShard(FileShard):
    """One file of either format. It is memory-mapped, so only the pages of the columns that are read are ever read."""

    def __init__(self, file: DataFile, identity: str, rows: RowReader, cache: FileCache) -> None:
        super().__init__(file, identity, gives_examples=rows.gives_examples)
        self._rows = rows
        self._starts, num_rows = self._cached_index(cache.folder, self._index, rows.section, rows.columns_key)
        self.runs: Sequence[int] = num_rows.tolist()
        self.rows_at_once = rows_held_at_once(file.size_bytes, sum(self.runs))

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of rows; all in one record batch."""
        batch, first = self._run_of(rows[0])
        try:
            with self._file.local() as path, self._open(path) as (source, reader):
                found = _batch_at(int(self._starts[batch]), source, reader)
                checked = pa.RecordBatch.from_arrays([_checked(column) for column in found.columns], found.schema.names)
                places = [row - first for row in rows]
                read = texts_at(one_array(checked, self._rows), places, rows, self._rows, where=self._file.url)
                texts = [made(text) for text in read]
        except (pa.ArrowException, OSError, EOFError, StopIteration, IndexError) as error:
            where = f"{self._file.url}, record batch {batch}"
            texts = [BadRow(damage("the file is damaged", error, where=where))] * len(rows)
        return texts

    def _index(self) -> NDArray[np.int64]:
        """Find where each record batch starts and how many rows it has; shape [2, batches]."""
        batches: list[tuple[int, int]] = []
        try:
            with self._file.local() as path, self._open(path) as (source, reader):
                place = source.tell()
                for batch in reader:
                    batches.append((place, batch.num_rows))
                    place = source.tell()
                # A stream that is cut between two batches looks as if it ended there.
                source.seek(place)
                if source.read(len(_END_MARK)) != _END_MARK:
                    raise EOFError("it ends before its end mark")
        except (pa.ArrowException, OSError, EOFError) as error:
            raise damage("not a whole arrow file", error, where=self._file.url) from error
        return np.array([batch for batch in batches if batch[1]], dtype=np.int64).reshape(-1, 2).T.copy()

    @contextmanager
    def _open(self, path: Path) -> Iterator[tuple[pa.MemoryMappedFile, ipc.RecordBatchStreamReader]]:
        """Map the file and read its schema; the reader goes on from wherever the mapped file is set."""
        with pa.memory_map(str(path)) as source:
            start = len(_FILE_MARK) if source.read(len(_FILE_MARK)) == _FILE_MARK else 0
            source.seek(start)
            schema = ipc.read_schema(source)
            columns = check_schema(schema, self._rows, where=self._file.url)
            places = [schema.names.index(name) for name in columns]
            source.seek(start)
            yield source, ipc.open_stream(source, options=ipc.IpcReadOptions(included_fields=places))


def _batch_at(offset: int, source: pa.MemoryMappedFile, reader: ipc.RecordBatchStreamReader) -> pa.RecordBatch:
    """Read the record batch there; where dictionaries stand between batches, by way of all before it."""
    if not any("dictionary<" in str(kind) for kind in reader.schema.types):
        source.seek(offset)
    while source.tell() < offset:
        reader.read_next_batch()
    return reader.read_next_batch()


def _checked(column: pa.Array) -> pa.Array:
    """Give the column once its offsets are known to lie inside its buffers: Arrow itself trusts them."""
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    # As bytes, because one row that is no UTF-8 does not spoil the others.
    (column.view(binary[column.type]) if column.type in binary else column).validate(full=True)
    return column


_BUFFER_BYTES = 1 << 20
# A small corpus is read in blocks that are much smaller than its row groups, in a mixed order.
_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 4 << 20, 64 << 20
# What repeated values may take of the rows that are read together.
_MOST_REPEATED_BYTES = 64 << 20
# A page may be as large as its row group, and is decoded whole.
_MOST_DECODED_BYTES = 256 << 20


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
        # Other types have no dictionaries in Arrow.
        self._byte_arrays = [leaf.path for leaf in leaves.values() if leaf.physical_type == "BYTE_ARRAY"]
        self._has_lists = any(leaf.max_repetition_level for leaf in leaves.values())
        self._dictionaries_of: dict[int, list[str]] = {}
        self._groups = [_group_of(metadata.row_group(index), [*leaves]) for index in range(metadata.num_row_groups)]
        packed_bytes = sum(group.packed_bytes for group in self._groups)
        text_bytes = sum(group.decoded_bytes for group in self._groups)
        if expands_too_much(packed_bytes, text_bytes, allowed_bytes=_MOST_DECODED_BYTES):
            raise ContentError(
                "what is read of it expands beyond reason",
                where=f"{file.url}, column {', '.join(self._columns)}",
                found=f"{packed_bytes:,} bytes that become {text_bytes:,}",
            )
        self.runs: Sequence[int] = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        self._starts = np.array([_first_byte(metadata.row_group(index)) for index in range(metadata.num_row_groups)])
        self.rows_at_once = rows_held_at_once(text_bytes, metadata.num_rows)

    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of rows; all in one row group. Examples are decoded one by one, as they are taken.

        After a damaged place of a row group all rows are bad. Those before it are not, whatever is asked together.
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
                if len(inside):
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
        if kept is None and self._groups[group].decoded_bytes <= _LARGEST_KEPT_BYTES:
            # A damaged one is decoded row by row below, up to the damage.
            with contextlib.suppress(pa.ArrowException, OSError):
                # Together: each batch would hold a dictionary of its own.
                kept = list(self._decode(path, group, num_rows=self.runs[group], dictionaries=self._byte_arrays))
                recent.put(self, group, kept)
        if kept is None:
            dictionaries = self._dictionaries(path, group)
            yield from self._decode(path, group, num_rows=self.rows_at_once, dictionaries=dictionaries)
        else:
            yield from kept

    def _dictionaries(self, path: Path, group: int) -> list[str]:
        """Give the columns of a large row group that are read as dictionaries.

        One value of a small file can stand for a million. But of a column that goes on without its dictionary, as most
        do, Arrow adds each value to the one in memory, and copies that for each batch.
        """
        if group not in self._dictionaries_of:
            sizes, columns = self._groups[group], self._byte_arrays
            if not self._has_lists:
                column = next(self._decode(path, group, num_rows=1, dictionaries=columns))
                largest_bytes = _largest_row(column)
                is_small = largest_bytes * self.rows_at_once <= _MOST_REPEATED_BYTES
                all_bytes, allowed_bytes = largest_bytes * self.runs[group], _MOST_DECODED_BYTES
                if is_small and not expands_too_much(sizes.packed_bytes, all_bytes, allowed_bytes=allowed_bytes):
                    columns = []
            self._dictionaries_of[group] = columns
        return self._dictionaries_of[group]

    def _decode(self, path: Path, group: int, *, num_rows: int, dictionaries: list[str]) -> Iterator[pa.Array]:
        options = {"read_dictionary": dictionaries, "buffer_size": _BUFFER_BYTES, "page_checksum_verification": True}
        with pq.ParquetFile(path, **options) as file:
            for batch in file.iter_batches(num_rows, [group], self._columns, use_threads=False):
                yield one_array(batch, self._rows)


def _largest_row(column: pa.Array) -> int:
    """Bytes of a row that has the largest value of each dictionary. Args: column: texts, or structs without lists."""
    children = column.flatten() if pa.types.is_struct(column.type) else [column]
    dictionaries = [child.dictionary for child in children if isinstance(child, pa.DictionaryArray)]
    return sum(int(_decoded_bytes(values).max(initial=0)) for values in dictionaries)


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return int(column.dictionary_page_offset or column.data_page_offset)


def _leaves(metadata: pq.FileMetaData, columns: list[str]) -> dict[int, pq.ColumnSchema]:
    """Give what is stored of some columns, by number: of a nested one each value, as messages.list.element.role."""
    every = {number: metadata.schema.column(number) for number in range(metadata.num_columns)}
    return {n: leaf for n, leaf in every.items() if leaf.path in columns or leaf.path.split(".")[0] in columns}


class _Group(NamedTuple):
    """What the footer tells of the leaves of a row group."""

    packed_bytes: int
    decoded_bytes: int
    """Bytes in memory, where a value of a dictionary counts once."""


def _group_of(group: pq.RowGroupMetaData, leaves: list[int]) -> _Group:
    chunks = [group.column(number) for number in leaves]
    return _Group(
        sum(chunk.total_compressed_size for chunk in chunks),
        # Each value has its place in memory, also where a million equal ones take a few bytes in the file.
        sum(chunk.total_uncompressed_size + _VALUE_BYTES * chunk.num_values for chunk in chunks),
    )
