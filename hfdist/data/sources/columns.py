"""A column of texts in Arrow's memory: its type checked, its values decoded one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text, decode_text, missing_column


def check_schema(schema: pa.Schema, column: str, *, where: str) -> int:
    """Give the place of the text column among the columns.

    Raises:
        ContentError: it is not there, or holds no text.
    """
    if column not in schema.names:
        raise missing_column(column, schema.names, where=where)
    place = schema.names.index(column)
    kind = schema.field(place).type
    if not is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        raise ContentError("the text column holds no text", where=f"{where}, column {column}", found=str(kind))
    return place


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def texts_at(column: pa.Array, places: Sequence[int], rows: Sequence[int], *, where: str) -> list[str | BadRow]:
    """Decode some values of a column, which are those rows of what `where` names."""
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


def _text(value: pa.Scalar | None, where: str) -> str | BadRow:
    if value is None or not value.is_valid:
        return check_text(None, where=where)
    data = memoryview(value.as_buffer())
    return check_size(data.nbytes, where=where) or decode_text(data, where=where)
