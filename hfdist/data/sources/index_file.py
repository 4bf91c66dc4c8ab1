"""The index of a source, as files: all that a start must know of the source's files, so that it opens none of them.

    <folder>/index.json     summary of the index; written last
             files.arrow    a row for each file of the source, in canonical order, with the columns of `SCHEMA`
             starts         int64, little-endian: the first bytes of the rows or runs (`Layout.starts`) of all files

All ranks map the index. A folder may come from somebody else: whatever it says is bounded, or compared with the files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray
from pyarrow import ipc

from hfdist.atomic_write import write_atomically
from hfdist.data.order.runs import Runs
from hfdist.data.sources.base import FileShard, expands_too_much
from hfdist.errors import DataError

VERSION = 1
SUMMARY, FILES, STARTS = "index.json", "files.arrow", "starts"
SCHEMA = pa.schema(
    [
        pa.field("name", pa.large_string(), nullable=False),
        # The file's address without that of the source at its beginning.
        pa.field("place", pa.large_string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("version", pa.large_string(), nullable=False),
        pa.field("identity", pa.large_string(), nullable=False),
        pa.field("held_bytes", pa.int64(), nullable=False),
        pa.field("num_starts", pa.int64(), nullable=False),
        # XXH3 of the file's part of `starts`.
        pa.field("starts_hash", pa.uint64(), nullable=False),
        pa.field("runs", pa.large_list(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        # Hashes of the file's parts, where they are known.
        pa.field("contents", pa.large_list(pa.field("item", pa.uint64(), nullable=False))),
    ]
)
_MOST_SUMMARY_BYTES = 1 << 26
_MOST_ROWS_A_BYTE = 1000
_ALLOWED_ROWS = 1 << 28
"""A file may have `_ALLOWED_ROWS` rows, or up to `_MOST_ROWS_A_BYTE` rows for each of its bytes."""
_MOST_ROWS = 1 << 34
"""Rows that a whole source may have: the order of more would not fit in memory."""
_MAGIC = b"ARROW1\0\0"
_HEADER, _METADATA, _COMPRESSION = 2, 4, 3
"""Numbers of fields in Arrow's flatbuffers: two of a Message, and one of its RecordBatch."""
_MAKE_AGAIN = "delete the folder, and make the index anew: hfdist index"


def index_folder(section: str) -> str:
    """Give the path of a source's index below `<run.dir>/index`: NAME, or `eval_sources/NAME`."""
    return section.removeprefix("data.").removeprefix("sources.").replace(".", "/", 1)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The content of index.json."""

    rows_key: str
    """Digest of the columns and the format that are read (`RowReader.key`)."""
    listing: str
    """Digest of the names, sizes and versions of all files that were found."""
    files_hash: str
    """XXH3 of files.arrow."""
    left_out: list[str] = field(default_factory=list)
    """Address of each file that could not be read, and why."""


class Entry(NamedTuple):
    """A row of files.arrow; its fields are the columns of `SCHEMA`, in their order."""

    name: str
    place: str
    size_bytes: int
    version: str
    identity: str
    held_bytes: int
    num_starts: int
    starts_hash: int
    runs: Sequence[int]
    contents: Sequence[int] | None

    @classmethod
    def of(cls, shard: FileShard, place: str) -> Entry:
        """Make the row of an open shard; `place` is its file's address without the source's."""
        file, layout = shard.file, shard.layout
        return cls(
            name=file.name,
            place=place,
            size_bytes=file.size_bytes,
            version=file.version,
            identity=shard.identity,
            held_bytes=layout.held_bytes,
            num_starts=len(layout.starts),
            starts_hash=hash_of(layout.starts),
            runs=layout.runs.tolist(),
            contents=None if file.contents is None else file.contents.tolist(),
        )


def table_of(entries: Sequence[Entry]) -> pa.Table:
    """Make the table of files.arrow."""
    columns = [pa.array([entry[place] for entry in entries], column.type) for place, column in enumerate(SCHEMA)]
    return pa.table(columns, SCHEMA)


def hash_of(starts: NDArray[np.int64]) -> int:
    """Hash the starts of one file with XXH3."""
    return xxhash.xxh3_64(starts.astype("<i8", copy=False).tobytes()).intdigest()


def write_files(path: Path, table: pa.Table) -> str:
    """Write a table as files.arrow, and give the hash of the file: equal tables give equal bytes."""
    buffer = pa.BufferOutputStream()
    with ipc.new_file(buffer, SCHEMA) as writer:
        writer.write_batch(pa.record_batch([_as_one_array(column) for column in table.columns], schema=SCHEMA))
    content = memoryview(buffer.getvalue())

    def write(out: BinaryIO) -> None:
        out.write(content)

    write_atomically(path, write)
    return xxhash.xxh3_128(content).hexdigest()


def _as_one_array(column: pa.ChunkedArray) -> pa.Array:
    """Join the chunks of a column, of which there may be none: a table of equal rows has then equal bytes."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def write_summary(path: Path, summary: Summary) -> None:
    """Write a summary at `path`: index.json, or the file like it of a part of the index."""
    write_atomically(path, json.dumps({"version": VERSION, **asdict(summary)}, sort_keys=True).encode())


def read_summary(path: Path) -> Summary | None:
    """Read a summary; None: it is not there. DataError: it is damaged, or of another version."""
    try:
        if path.stat().st_size > _MOST_SUMMARY_BYTES:
            raise ValueError("too large")
        values = json.loads(path.read_bytes())
        version = values.pop("version")
        if version == VERSION:
            summary = Summary(**values)
            texts = [summary.rows_key, summary.listing, summary.files_hash, *summary.left_out]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("no text where one must be")
            return summary
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise damaged_index(path, str(error)) from error
    what, found, allowed = "the index is of another version", f"version {version}", f"version {VERSION}"
    raise DataError(what, where=str(path), found=found, allowed=allowed, hint=_MAKE_AGAIN)


def read_files(path: Path, digest: str) -> pa.RecordBatch:
    """Map a files.arrow with the hash `digest`, and check all its rows; DataError: it is damaged, or cannot be true."""
    try:
        source = pa.memory_map(str(path))
        if xxhash.xxh3_128(memoryview(source.read_buffer())).hexdigest() != digest:
            raise damaged_index(path, "another hash")
        # The file begins with a stream, whose messages can each be seen before they are decoded.
        source.seek(len(_MAGIC))
        schema, message, *others = ipc.MessageReader.open_stream(source)
        if ipc.read_schema(schema) != SCHEMA or others:
            raise damaged_index(path, "other columns")
        if _is_packed(memoryview(message.metadata)):
            raise damaged_index(path, "compressed columns")
        batch = ipc.read_record_batch(message, SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise damaged_index(path, str(error)) from error
    for problem in _problems(batch):
        raise damaged_index(path, problem)
    return batch


def _is_packed(message: memoryview) -> bool:
    """Whether columns of a record batch are compressed, which pyarrow does not tell.

    `message` is a flatbuffer of the table Message in Arrow's Message.fbs, which pyarrow has verified:

        root:       [ offset of the Message ]
        a table:    [ minus the offset of its list ][ values ... ]
        its list:   [ size of the list ][ size of the table ][ offset of field 0 in the table; 0: not set ] ...
    """

    def place_of(table: int, field: int) -> int:
        """Give the place of a field of the table at a place; 0: the field is not set."""
        (distance,) = struct.unpack_from("<i", message, table)
        offsets = table - distance
        (size,) = struct.unpack_from("<H", message, offsets)
        # Two numbers of 2 bytes come before the fields. A list ends with the last field that is set.
        place = 4 + 2 * field
        if place >= size:
            return 0
        (offset,) = struct.unpack_from("<H", message, offsets + place)
        return table + int(offset) if offset else 0

    (root,) = struct.unpack_from("<I", message, 0)
    header = place_of(root, _HEADER)
    (distance,) = struct.unpack_from("<I", message, header)
    batch = header + distance
    # Old versions of Arrow say it in the metadata.
    return bool(place_of(batch, _COMPRESSION) or place_of(root, _METADATA))


def _problems(batch: pa.RecordBatch) -> Iterator[str]:
    """Say what in the rows cannot be true; whole columns are compared, since there may be a million rows."""
    if any(batch.column(place).null_count for place, one in enumerate(SCHEMA) if not one.nullable):
        yield "a value is missing"
    if any(batch.column(name).flatten().null_count for name in ("runs", "contents")):
        yield "a run, or a hash, is missing"
    names, sizes = batch.column("name"), integer_column(batch, "size_bytes")
    if not pc.all(pc.less(names[:-1], names[1:]), min_count=0).as_py():
        yield "the names are not in order"
    runs = runs_of(batch)
    if (sizes <= 0).any() or (runs.rows < 0).any() or (runs.per_shard <= 0).any():
        yield "a size, or a number of rows, is none"
    rows = runs.rows.astype(np.float64)
    before = np.concatenate([[0.0], np.cumsum(rows)])
    ends = np.cumsum(runs.per_shard)
    per_file = before[ends] - before[ends - runs.per_shard]
    if (per_file > np.maximum(sizes * float(_MOST_ROWS_A_BYTE), _ALLOWED_ROWS)).any() or rows.sum() > _MOST_ROWS:
        yield "more rows than the files can hold"
    if (per_file <= 0).any():
        yield "a file without rows"
    starts, held = integer_column(batch, "num_starts"), integer_column(batch, "held_bytes")
    if (starts <= 0).any() or (held < 0).any() or starts.astype(np.float64).sum() > np.iinfo(np.int64).max // 8:
        yield "a number of starts is none"
    # A file has a start of each run; or one of each row of its only run, and the end of the last row.
    if not ((starts == runs.per_shard) | ((runs.per_shard == 1) & (starts - 1 == per_file))).all():
        yield "more rows, or runs, than starts"


def integer_column(batch: pa.RecordBatch, column: str) -> NDArray[np.int64]:
    """Give a column of whole numbers without a copy; shape [files]."""
    found: NDArray[np.int64] = batch.column(column).to_numpy(zero_copy_only=True)
    return found


def runs_of(batch: pa.RecordBatch) -> Runs:
    """Give the runs of all files without a copy."""
    if len(batch) == 0:
        return Runs.of([])
    column = batch.column("runs")
    offsets = column.offsets.to_numpy(zero_copy_only=True)
    rows = column.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]]
    return Runs(rows, np.diff(offsets))


def map_starts(path: Path, batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Map the starts of all files, end to end; DataError: there are more or fewer than `batch` says."""
    total = int(integer_column(batch, "num_starts").sum())
    try:
        found = path.stat().st_size
        if found == total == 0:
            return np.empty(0, dtype=np.int64)
        if found == 8 * total:
            # It becomes a plain array, since slices of a memmap cost ten times as much.
            return np.asarray(np.memmap(path, "<i8", "r"))
    except OSError as error:
        raise damaged_index(path, str(error)) from error
    raise damaged_index(path, f"{found} bytes, not {8 * total}")


def check_lines(starts: NDArray[np.int64], entry: Entry, *, is_packed: bool, most_bytes: int | None) -> None:
    """Check the starts of the rows of a file, shape [rows + 1], in bytes; ValueError: one of them cannot be true.

    `is_packed`: the starts are places in the unpacked file. `most_bytes`: size of the largest row; None: any size.
    """
    lengths = np.diff(starts)
    has_one_run = len(entry.runs) == 1 and entry.runs[0] == len(lengths)
    if not has_one_run or starts[0] < 0 or (lengths < 0).any():
        raise ValueError("the starts of its rows are not in order")
    end = int(starts[-1])
    may_be_longer = is_packed and not expands_too_much(entry.size_bytes, end, allowed_bytes=1 << 30)
    if end > entry.size_bytes and not may_be_longer:
        raise ValueError("rows after its end")
    if most_bytes is not None and (lengths > most_bytes).any():
        raise ValueError("a row that is too long")


def damaged_index(path: Path, found: str) -> DataError:
    """Make the error of an index that cannot be used."""
    return DataError("the index is damaged", where=str(path), found=found, hint=_MAKE_AGAIN)
