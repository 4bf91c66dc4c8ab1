"""Columns in Arrow's memory: types checked, values decoded one by one, and hashed whatever their chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text, decode_text
from hfdist.data.sources.columns import Column, Kind
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.values import without_nulls
from hfdist.errors import first_line

VALUE_BYTES = 8
"""Bytes that each value takes in memory besides its text."""


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


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type, or values within them, are places in a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionary(kind.storage_type)
    return pa.types.is_dictionary(kind) or any(has_dictionary(kind.field(n).type) for n in range(kind.num_fields))


def one_array(batch: pa.RecordBatch, rows: RowReader) -> pa.Array:
    """Give what is read of some rows, as one array for `texts_at`."""
    if rows.gives_examples:
        examples = batch.to_struct_array()
        kind = _without_views(examples.type)
        return examples if kind == examples.type else examples.cast(kind)
    column = batch.column(0)
    for name in _text_place(batch.schema, rows.text)[1:]:
        column = pc.struct_field(column, name)
    return column


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Give a type whose texts are plain ones: Arrow takes no rows of columns with views, which polars writes."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(*(field.with_type(_without_views(field.type)) for field in (kind.key_field, kind.item_field)))
    return kind


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
    sizes = decoded_bytes(taken).tolist()
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


def decoded_bytes(array: pa.Array) -> NDArray[np.int64]:
    """Give the bytes that each value takes once decoded: those of its texts, and a few for all else. Shape [values].

    Values of a dictionary count for each time that they are used.
    """
    kind = array.type
    if isinstance(array, pa.DictionaryArray):
        sizes = np.append(decoded_bytes(array.dictionary), VALUE_BYTES)
        # Nulls are told as the last one.
        return sizes[array.indices.fill_null(len(sizes) - 1).to_numpy(zero_copy_only=False)]
    if pa.types.is_struct(kind):
        return sum((decoded_bytes(child) for child in array.flatten()), np.full(len(array), VALUE_BYTES))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        before = np.concatenate([[0], np.cumsum(decoded_bytes(array.flatten()))])
        return before[ends] - before[ends - lengths] + VALUE_BYTES
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64) + VALUE_BYTES
    return np.full(len(array), VALUE_BYTES)


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
