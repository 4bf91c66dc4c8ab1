"""JSON lines: an index of line starts, made once and cached; compressed files are unpacked once."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from filelock import FileLock
from numpy.typing import NDArray

from hfdist.data.files import identify, write_atomically
from hfdist.data.sources.base import check_column, check_text
from hfdist.errors import DataError

_CHUNK_BYTES = 1 << 20
_UNPACKERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".zst": lambda path: zstandard.open(path, "rb"),
}


class JsonLinesShard:
    """One file of JSON objects, a line each."""

    def __init__(self, path: Path, name: str, column: str, cache_dir: Path) -> None:
        self.name = name
        self.identity = identify(path, column)
        self._original, self._column = path, column
        self._path, self._starts = _open_cached(path, cache_dir)
        self.runs: Sequence[int] = [len(self._starts) - 1]
        if self.runs[0]:
            check_column(column, list(self._object(0)), where=str(path))

    def read(self, row: int) -> str:
        """Give the text of a line. Blank lines are no rows."""
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
    unpack = _UNPACKERS.get(path.suffix)
    with FileLock(f"{stem}.lock"):
        if unpack is not None:
            plain = stem.with_suffix(".jsonl")
            if not plain.is_file():
                write_atomically(plain, lambda out: _unpack(path, unpack, out))
        if not index.is_file():
            starts = _line_starts(plain)
            write_atomically(index, lambda out: np.save(out, starts, allow_pickle=False))
    return plain, np.load(index, mmap_mode="r", allow_pickle=False)


def _unpack(path: Path, opener: Callable[[Path], Any], out: BinaryIO) -> None:
    try:
        with opener(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                out.write(chunk)
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"the compressed file is damaged or cut off: {error}", where=str(path)) from error


def _line_starts(path: Path) -> NDArray[np.int64]:
    starts, place = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                starts.append(place)
            place += len(line)
    # A blank line belongs to the row before it: JSON allows white space behind a value.
    return np.array([*starts, place], dtype=np.int64)
