"""What a source must offer, and the checks that all of them share."""

from __future__ import annotations

import difflib
import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hfdist.data.sources.document_batch import TokenColumns
from hfdist.data.storage.contents import digests_of, is_in_identity, part_bytes
from hfdist.data.storage.datafile import DataFile
from hfdist.errors import DataError, ResourceError

MOST_ROW_BYTES = 64 << 20
# What each lane may hold of its block. Lanes take turns in runs of their own, and those of many writers hold a million
# rows: only small runs can be kept decoded, and only in part.
HELD_BYTES = 2 << 20
MOST_ROWS_AT_ONCE = 1024
_SHOWN_BYTES = 80


class ContentError(DataError):
    """What a row or a file holds cannot be read as documents; what happens then is `data.on_bad_rows`."""


@dataclass(frozen=True)
class BadRow:
    """A row that gives no text, and why; what happens then is `data.on_bad_rows`."""

    error: DataError


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A document as tokens."""

    tokens: NDArray[np.int32]
    """With the end-of-text token behind; shape [tokens]. May be a read-only view."""
    text_digest: int
    """`tokenize.text_digest` of its text: decides whether it is held out."""


class Shard(Protocol):
    """A file, or whatever else is read as one."""

    name: str
    """Path relative to the source, or an id."""
    identity: str
    """Of what is read from it, the same on every machine; told without reading all of it."""
    runs: Sequence[int]
    """Numbers of rows that are cheap to read together, in order; their sum is the number of rows."""

    gives_examples: bool
    """Whether texts are examples in canonical JSON: see `examples.py`."""
    rows_at_once: int
    """How many rows of a run to ask for together; 1 where one row costs no more alone."""

    @property
    def local_identity(self) -> str:
        """For this machine's caches: with address, version and contents, also where size and ends stay alike."""

    @property
    def contents(self) -> NDArray[np.uint64] | None:
        """Hashes of its parts, in order, the same on every machine; None: of all that is in `identity`, or unknown."""

    @property
    def place(self) -> tuple[str, str] | None:
        """Address and version of the file, which may tell of a change that nothing else does; None: all is compared."""

    def read(self, rows: Sequence[int]) -> Sequence[str | BadRow]:
        """Give the texts of some rows of one run, in the order asked for; look at each once, it may be made then.

        Raises:
            DataError: the file has changed since it was opened, or cannot be read at all.
        """

    def rows_of_part(self, part: int) -> range | None:
        """Tell the rows of which something lies in a part of `contents`; None: nobody knows."""


class TokenShard(Shard, Protocol):
    """A shard that holds tokens instead of text."""

    def token_columns(self, rows: NDArray[np.int64]) -> TokenColumns:
        """Give the documents of some rows of one run, in the order asked for."""


def local_identity(identity: str, file: DataFile) -> str:
    """Give the `local_identity` of a shard that is a file."""
    return json.dumps([identity, file.url, file.version, *digests_of(file.contents)])


def uncompared(file: DataFile) -> tuple[str, str] | None:
    """Give the `place` of a shard that is a file."""
    return None if file.contents is not None or is_in_identity(file) else (file.url, file.version)


def spans_of_part(starts: NDArray[np.int64], file: DataFile, part: int) -> tuple[int, int]:
    """Which spans a part of a file cuts: the first, and the one behind the last; `starts` are their first bytes."""
    size = part_bytes(file.size_bytes)
    first = max(int(np.searchsorted(starts, part * size, side="right")) - 1, 0)
    return first, max(int(np.searchsorted(starts, (part + 1) * size)), first + 1)


def rows_of_runs(first: int, stop: int, runs: Sequence[int]) -> range:
    """Rows of some neighbouring runs."""
    return range(sum(runs[:first]), sum(runs[:stop]))


def rows_held_at_once(num_bytes: int, num_rows: int) -> int:
    """How many rows of the mean size to read together, so that a lane holds about `HELD_BYTES`."""
    return min(max(HELD_BYTES * num_rows // max(num_bytes, 1), 1), MOST_ROWS_AT_ONCE)


def missing_column(column: str, present: Sequence[str], *, where: str, section: str) -> ContentError:
    """Say that there is no such column, which there are, and which one was probably meant."""
    near = difflib.get_close_matches(column, present, n=1, cutoff=0.0)
    return ContentError(
        f"there is no column {column!r}",
        where=where,
        allowed=", ".join(present),
        hint=f"{section}.text={near[0]}" if near else None,
    )


def check_size(size_bytes: int, *, where: str) -> BadRow | None:
    """Refuse a row that would not fit into memory many times over."""
    if size_bytes <= MOST_ROW_BYTES:
        return None
    return BadRow(
        ContentError("the row is too large", where=where, found=f"{size_bytes:,} bytes", allowed=f"{MOST_ROW_BYTES:,}")
    )


def check_text(value: Any, *, where: str) -> str | BadRow:
    """Give `value` if it is text; half of a surrogate pair, which JSON allows and UTF-8 does not, becomes `?`."""
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__}: {value!r:.{_SHOWN_BYTES}}"
        return BadRow(ContentError("the text column holds no text", where=where, found=found, allowed="a string"))
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def decode_text(data: bytes | memoryview, *, where: str, first_byte: int = 0, errors: str = "strict") -> str | BadRow:
    """Give bytes, the first of which has that number, as text; `errors="replace"` takes those that are not UTF-8."""
    try:
        return str(data, "utf-8", errors)
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.end]
        place = f"{where}, byte {first_byte + error.start} of the text"
        return BadRow(ContentError("not UTF-8", where=place, found=found))


def damage(what: str, error: Exception, *, where: str) -> ContentError:
    """Say what a library found wrong with a file.

    Raises:
        DataError, ResourceError: the network, or this machine, could not read it; what it holds is not known.
    """
    if isinstance(error.__cause__, DataError):
        raise error.__cause__
    if isinstance(error, MemoryError):
        raise ResourceError("there is not enough memory to read it", where=where, found=first_line(error)) from error
    # A seek to a place that a damaged file names is an invalid argument.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise DataError(f"cannot be read: {error.strerror}", where=where) from error
    return ContentError(f"{what}: {first_line(error)}", where=where)


def first_line(error: Exception) -> str:
    """What a library says, without its traceback."""
    return (str(error) or type(error).__name__).splitlines()[0]
