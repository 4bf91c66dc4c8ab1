"""JSON lines: an index of line starts, made once and cached; compressed files are unpacked once."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.typing import NDArray

from hfdist.data.files import identify, write_atomically
from hfdist.data.sources.base import check_column, check_text
from hfdist.errors import DataError

_CHUNK_BYTES = 1 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}


class JsonLinesShard:
    """One file of JSON objects, a line each."""

    def __init__(self, path: Path, name: str, column: str, cache_dir: Path) -> None:
        self.name = name
        self.identity = identify(path, column)
        self._original, self._column = path, column
        self._path, self._starts = _open_cached(path, cache_dir)
        self.runs: Sequence[int] = [len(self._starts) - 1]
        self.rows_at_once = 1
        if self.runs[0]:
            check_column(column, list(self._object(0)), where=str(path))

    def read(self, rows: Sequence[int]) -> list[str]:
        """Give the texts of lines. Blank lines are no rows."""
        return [self._text(row) for row in rows]

    def _text(self, row: int) -> str:
        value = self._object(row)
        place = f"{self._original}, row {row}"
        if self._column not in value:
            check_column(self._column, list(value), where=place)
        return check_text(value[self._column], where=place)

    def _object(self, row: int) -> dict[str, Any]:
        start, stop = int(self._starts[row]), int(self._starts[row + 1])
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(stop - start)
        where = f"{self._original}, row {row}, byte {start} of the text"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError("not UTF-8", where=where, found=line[error.start : error.end]) from error
        except json.JSONDecodeError as error:
            found = line[:80].decode("utf-8", "replace")
            raise DataError(f"not JSON: {error.msg}, column {error.colno}", where=where, found=found) from error
        if not isinstance(value, dict):
            raise DataError("a line is not a JSON object", where=where, found=value, allowed='{"text": ...}')
        return value


def _open_cached(path: Path, cache_dir: Path) -> tuple[Path, NDArray[np.int64]]:
    """Give the plain file and its line starts (with the end behind them), from the cache where they are there."""
    status = path.stat()
    identity = json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns])
    folder = cache_dir / "jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    index, plain = stem.with_suffix(".npy"), path
    codec = _CODECS.get(path.suffix)
    with FileLock(f"{stem}.lock"):
        if codec is not None:
            plain = stem.with_suffix(".jsonl")
            if not plain.is_file():
                write_atomically(plain, lambda out: _unpack(path, codec, out))
        if not index.is_file():
            starts = _line_starts(plain)
            write_atomically(index, lambda out: np.save(out, starts, allow_pickle=False))
    return plain, np.load(index, mmap_mode="r", allow_pickle=False)


def _unpack(path: Path, codec: str, out: BinaryIO) -> None:
    # Arrow's reader, because zstandard's takes a file that is cut off for one that ends there.
    with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, codec) as unpacked:
        while chunk := _next_chunk(unpacked, path):
            out.write(chunk)


def _next_chunk(unpacked: pa.NativeFile, path: Path) -> bytes:
    try:
        chunk: bytes = unpacked.read(_CHUNK_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"the compressed file is damaged or cut off: {error}", where=str(path)) from error
    return chunk


def _line_starts(path: Path) -> NDArray[np.int64]:
    # An array: eight bytes a line, where a list takes forty.
    starts, place = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                starts.append(place)
            place += len(line)
    # A blank line belongs to the row before it: JSON allows white space behind a value.
    starts.append(place)
    return np.frombuffer(starts, dtype=np.int64)
