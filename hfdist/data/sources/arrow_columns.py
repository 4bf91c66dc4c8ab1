"""Columns that Arrow holds in memory: their types are checked, and their values are decoded and hashed."""

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
    """Give the names of the columns that `rows` reads of a file; `where` names the file in messages.

    ContentError: the file lacks columns that are needed, or its column of texts holds no text.
    """
    columns = rows.columns({field.name: _kind_of(field.type) for field in schema}, where=where)
    if rows.gives_examples:
        return columns
    # The config may name several columns that could hold the texts; one of them is read.
    column, *_ = _path_of_texts(schema, rows.text, where)
    return [column]


def _path_of_texts(schema: pa.Schema, text: Column, where: str = "") -> tuple[str, ...]:
    """Give the path to the texts: the name of a column, then the names of the fields within it.

    ContentError: no path that `text` names leads to texts.
    """
    problems: list[ContentError] = []
    for path in text.places(schema.names):
        problem = _why_no_texts(schema, path, text, where)
        if problem is None:
            return path
        problems.append(problem)
    raise problems[0]


def _why_no_texts(schema: pa.Schema, path: tuple[str, ...], text: Column, where: str) -> ContentError | None:
    """Say why a path leads to no texts; None: it leads to texts."""
    column, *fields = path
    where = f"{where}, column {column}"
    kind = schema.field(column).type
    for name in fields:
        if not pa.types.is_struct(kind):
            return ContentError(f"there is no column {text}", where=where, allowed="none within it")
        if kind.get_field_index(name) < 0:
            allowed = ", ".join(field.name for field in kind)
            return ContentError(f"there is no column {text}", where=where, allowed=allowed)
        kind = kind.field(name).type
    if not is_text(_value_type(kind)):
        return ContentError("the text column holds no text", where=where, found=str(kind))
    return None


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Give the type of the values that a column stands for, whether they are in a dictionary or not."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _kind_of(kind: pa.DataType) -> Kind:
    """Tell what messages call the values of an Arrow type."""
    kind = _value_type(kind)
    if is_text(kind):
        return Kind.text
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return Kind.flag
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and pa.types.is_struct(kind.value_type):
        return Kind.turns
    return Kind.other


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type, or values within them, are places in a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionary(kind.storage_type)
    return pa.types.is_dictionary(kind) or any(has_dictionary(kind.field(n).type) for n in range(kind.num_fields))


def one_array(batch: pa.RecordBatch, rows: RowReader) -> pa.Array:
    """Give the columns of a batch that are read, as one array with a value for each row: `texts_at` decodes it."""
    if rows.gives_examples:
        examples = batch.to_struct_array()
        kind = _without_views(examples.type)
        return examples if kind == examples.type else examples.cast(kind)
    column = batch.column(0)
    _, *fields = _path_of_texts(batch.schema, rows.text)
    for name in fields:
        column = pc.struct_field(column, name)
    return column


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Give the type with plain texts in place of views, which polars writes: Arrow cannot take rows out of views."""
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


LazyText = str | BadRow | Callable[[], str | BadRow]
"""A text, or a function that makes it: a thousand examples that share one value would be large as texts."""


def make_text(text: LazyText) -> str | BadRow:
    """Give the text itself."""
    return text() if callable(text) else text


def texts_at(
    column: pa.Array, places: Sequence[int], numbers: Sequence[int], rows: RowReader, *, where: str
) -> Sequence[LazyText]:
    """Decode the values of `one_array` that stand at `places` in it.

    `numbers` are the numbers of these rows in their file, and `where` names the file: messages have both.
    """
    if not rows.gives_examples:
        return _plain_texts(column, places, numbers, where)
    taken = column.take(pa.array(places, pa.int64()))
    sizes = decoded_bytes(taken).tolist()
    return [
        partial(_example, taken, place, sizes[place], rows, f"{where}, row {number}")
        for place, number in enumerate(numbers)
    ]


def _example(column: pa.Array, place: int, size_bytes: int, rows: RowReader, where: str) -> str | BadRow:
    """Decode the row at a place of a column, and write it as an example."""
    too_large = check_size(size_bytes, where=where)
    if too_large is not None:
        return too_large
    try:
        row = column[place].as_py()
    # Arrow decodes nested values, and raises no narrower errors for damaged ones.
    except (ValueError, OverflowError) as error:
        return BadRow(ContentError(f"the row cannot be decoded: {first_line(error)}", where=where))
    return rows.read(without_nulls(row), where=where)


def decoded_bytes(array: pa.Array) -> NDArray[np.int64]:
    """Estimate the bytes that each value takes when it is decoded: its texts, and a few bytes for all else.

    Shape [values].

    A value of a dictionary counts each time that it is used.
    """
    kind = array.type
    if isinstance(array, pa.DictionaryArray):
        sizes = np.append(decoded_bytes(array.dictionary), VALUE_BYTES)
        # A null has no place in the dictionary: the size appended after its values stands for it.
        return sizes[array.indices.fill_null(len(sizes) - 1).to_numpy(zero_copy_only=False)]
    if pa.types.is_struct(kind):
        return sum((decoded_bytes(child) for child in array.flatten()), np.full(len(array), VALUE_BYTES))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        # A list has the items from `end - length` to `end`; `before[n]` sums the bytes of the first n items.
        ends = np.cumsum(lengths)
        before = np.concatenate([[0], np.cumsum(decoded_bytes(array.flatten()))])
        return before[ends] - before[ends - lengths] + VALUE_BYTES
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64) + VALUE_BYTES
    return np.full(len(array), VALUE_BYTES)


def _plain_texts(column: pa.Array, places: Sequence[int], numbers: Sequence[int], where: str) -> list[LazyText]:
    """Decode plain texts at places of a column; of texts in a dictionary each one once."""
    values, keys = column, places
    if isinstance(column, pa.DictionaryArray):
        # A thousand rows may share one value of many megabytes.
        values, keys = column.dictionary, column.indices.take(pa.array(places, pa.int64())).to_pylist()
    decoded: dict[int | None, str] = {}
    texts: list[LazyText] = []
    for number, key in zip(numbers, keys, strict=True):
        if key in decoded:
            texts.append(decoded[key])
            continue
        text = _text(None if key is None else values[key], f"{where}, row {number}")
        # A bad row is not shared: its error names its own number.
        if isinstance(text, str):
            decoded[key] = text
        texts.append(text)
    return texts


def hash_table(table: pa.Table) -> int:
    """Hash the values of a table with XXH3: equal values have equal hashes, whatever their chunks and offsets are."""
    hashed = xxhash.xxh3_64()
    for name, column in zip(table.column_names, table.columns, strict=True):
        hashed.update(name.encode())
        _hash_array(column.combine_chunks(), hashed)
    return hashed.intdigest()


def _hash_array(array: pa.Array, hashed: xxhash.xxh3_64) -> None:
    """Add which values are null, then those that are not, by their type."""
    hashed.update(array.is_valid().to_numpy(zero_copy_only=False).tobytes())
    present, kind = array.drop_null(), array.type
    if pa.types.is_struct(kind):
        for child in present.flatten():
            _hash_array(child, hashed)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        hashed.update(pc.list_value_length(present).cast(pa.int64()).to_numpy().tobytes())
        _hash_array(present.flatten(), hashed)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # Arrow keeps texts in three buffers: which are null, where each begins (and the last ends), all characters.
        present = present.cast(pa.large_binary())
        ends = np.frombuffer(present.buffers()[1], np.int64)[present.offset : present.offset + len(present) + 1]
        hashed.update(np.diff(ends).tobytes())
        if len(present):
            hashed.update(memoryview(present.buffers()[2])[ends[0] : ends[-1]])
    else:
        hashed.update(json.dumps(present.to_pylist(), default=str).encode())


def _text(value: pa.Scalar | None, where: str) -> str | BadRow:
    """Decode one text."""
    if value is None or not value.is_valid:
        return check_text(None, where=where)
    data = memoryview(value.as_buffer())
    too_large = check_size(data.nbytes, where=where)
    return decode_text(data, where=where) if too_large is None else too_large
