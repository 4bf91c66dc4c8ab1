"""Columns in Arrow's memory: types checked, values decoded one by one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text, decode_text, first_line
from hfdist.data.sources.rows import RowReader

_VALUE_BYTES = 8


def check_schema(schema: pa.Schema, rows: RowReader, *, where: str) -> list[str]:
    """Give the columns that are read, in the order of the file.

    Raises:
        ContentError: they are not there, or the one of plain text holds no text.
    """
    columns = rows.columns(schema.names, where=where)
    if not rows.gives_examples:
        kind = schema.field(rows.text).type
        if not is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise ContentError("the text column holds no text", where=f"{where}, column {rows.text}", found=str(kind))
    return columns


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def one_array(batch: pa.RecordBatch, rows: RowReader) -> pa.Array:
    """What is read of some rows, as one array for `texts_at`."""
    return batch.to_struct_array() if rows.gives_examples else batch.column(0)


def texts_at(
    column: pa.Array, places: Sequence[int], numbers: Sequence[int], rows: RowReader, *, where: str
) -> Sequence[str | BadRow]:
    """Decode some values of `one_array`, which are rows of those numbers of what `where` names.

    Examples are decoded each time that they are asked for, one by one: a thousand that share one value are small here
    and a thousand times as large as texts.
    """
    if rows.gives_examples:
        return _Examples(column.take(pa.array(places, pa.int64())), numbers, rows, where)
    return _plain_texts(column, places, numbers, where)


class _Texts(Sequence[str | BadRow], ABC):
    """Texts that are made when they are looked at."""

    @overload
    def __getitem__(self, index: int) -> str | BadRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[str | BadRow]: ...

    def __getitem__(self, index: int | slice) -> str | BadRow | list[str | BadRow]:
        if isinstance(index, slice):
            return [self._make(place) for place in range(*index.indices(len(self)))]
        return self._make(range(len(self))[index])

    @abstractmethod
    def _make(self, place: int) -> str | BadRow: ...


Pick = tuple[Sequence[str | BadRow], int]
"""Some texts, and which of them is meant."""


class Picked(_Texts):
    """Texts from among others.

    Args:
        picks: in order.
    """

    def __init__(self, picks: Sequence[Pick]) -> None:
        self._picks = picks

    def __len__(self) -> int:
        return len(self._picks)

    def _make(self, place: int) -> str | BadRow:
        texts, number = self._picks[place]
        return texts[number]


class _Examples(_Texts):
    """Rows as examples.

    Args:
        column: of `one_array`.
        numbers: of its rows.
        rows: what is read of them.
        where: the file.
    """

    def __init__(self, column: pa.Array, numbers: Sequence[int], rows: RowReader, where: str) -> None:
        self._column, self._numbers, self._rows, self._where = column, numbers, rows, where
        self._sizes = _decoded_bytes(column)

    def __len__(self) -> int:
        return len(self._numbers)

    def _make(self, place: int) -> str | BadRow:
        where = f"{self._where}, row {self._numbers[place]}"
        return check_size(int(self._sizes[place]), where=where) or _example(self._column[place], self._rows, where)


def _example(value: pa.StructScalar, rows: RowReader, where: str) -> str | BadRow:
    try:
        row = value.as_py()
    # Nested values are decoded by Arrow, which says no more than that.
    except (ValueError, OverflowError) as error:
        return BadRow(ContentError(f"the row cannot be decoded: {first_line(error)}", where=where))
    return rows.read(_without_nulls(row), where=where)


def _decoded_bytes(array: pa.Array) -> NDArray[np.int64]:
    """Of each value, what its parts take once they are decoded: bytes of texts, and a few for all else. Shape [values].

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


def _without_nulls(value: Any) -> Any:
    """Without the keys that Arrow fills up: structs of a column have the keys of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain_texts(column: pa.Array, places: Sequence[int], rows: Sequence[int], where: str) -> list[str | BadRow]:
    values, keys = column, places
    if isinstance(column, pa.DictionaryArray):
        # A thousand rows may share one value of many megabytes: it is decoded once.
        values, keys = column.dictionary, column.indices.take(pa.array(places, pa.int64())).to_pylist()
    shared: dict[int | None, str] = {}
    texts: list[str | BadRow] = []
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
