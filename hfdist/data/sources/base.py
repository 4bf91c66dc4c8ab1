"""What a source must offer, and the checks that all of them share."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hfdist.atomic_write import write_atomically
from hfdist.data.cache import cached_array
from hfdist.data.sources.document_batch import TokenColumns
from hfdist.data.storage.files import DataFile
from hfdist.data.storage.identity import digests_of, is_in_identity, part_bytes
from hfdist.errors import DataError, ResourceError, first_line

MOST_ROW_BYTES = 64 << 20
HELD_BYTES = 2 << 20
"""Bytes of decoded rows that a lane may hold. Each lane reads runs of its own, which may have a million rows."""
MOST_ROWS_AT_ONCE = 1024
_SHOWN_BYTES = 80
_MOST_EXPANSION = 1000


class ContentError(DataError):
    """What a row or a file holds cannot be read as documents; what happens then is `data.on_bad_rows`.

    `text_column` is a column that may hold the texts, where none has the name that was asked for.
    """

    def __init__(self, what: str, *, text_column: str | None = None, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.text_column = text_column


@dataclass(frozen=True)
class BadRow:
    """A row that gives no text, and why; what happens then is `data.on_bad_rows`."""

    error: DataError


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A document as tokens."""

    tokens: NDArray[np.int32]
    """Its tokens, with the end-of-text token at the end; shape [tokens]. May be a read-only view."""
    text_digest: int
    """`text_digest` of its text: decides whether it is held out."""


class Shard(Protocol):
    """A file, or whatever else is read as one."""

    name: str
    """Path relative to the source, or an id."""
    identity: str
    """Digest of what is read from it, the same on every machine; known without reading all of it."""
    runs: Sequence[int]
    """Numbers of rows that are cheap to read together, in order; their sum is the number of rows."""

    gives_examples: bool
    """Whether texts are examples in canonical JSON: see `formats.py`."""
    rows_at_once: int
    """How many rows of a run to ask for together; 1 where one row costs no more alone."""

    @property
    def local_identity(self) -> str:
        """Identity for this machine's caches, with address, version and contents: size and ends may stay alike."""

    @property
    def contents(self) -> NDArray[np.uint64] | None:
        """Hashes of its parts, in order, the same on every machine; None: of all that is in `identity`, or unknown."""

    @property
    def place(self) -> tuple[str, str] | None:
        """Address and version of the file, which may tell of a change that nothing else does; None: all is compared."""

    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of some rows of one run, in the order asked for; each may be made only when it is taken.

        DataError: the file has changed since it was opened, or cannot be read at all.
        """

    def rows_of_part(self, part: int) -> range | None:
        """Tell the rows of which something lies in a part of `contents`; None: nobody knows."""


class TokenShard(Shard, Protocol):
    """A shard that holds tokens instead of text."""

    def token_columns(self, rows: NDArray[np.int64]) -> TokenColumns:
        """Give the documents of some rows of one run, in the order asked for."""


def holds_tokens(shard: Shard) -> TypeGuard[TokenShard]:
    """Whether a shard holds tokens instead of text."""
    return hasattr(shard, "token_columns")


class Layout(NamedTuple):
    """Where the rows of a file lie: what must be known of it before a row is read."""

    runs: NDArray[np.int64]
    """Numbers of rows that are cheap to read together, shape [runs]."""
    starts: NDArray[np.int64]
    """First byte of each run, shape [runs]; or of each row, and the end of the last, shape [rows + 1]."""
    held_bytes: int
    """Bytes of all rows in memory, by which `rows_at_once` is chosen."""


class FileShard(ABC):
    """What the shards of files have in common."""

    runs: Sequence[int]

    def __init__(self, file: DataFile, identity: str, layout: Layout | None, *, gives_examples: bool = False) -> None:
        """Take a file with its layout; None: it is found out now, which may raise what `read` does not."""
        self.name, self.identity, self.gives_examples = file.name, identity, gives_examples
        self.local_identity = json.dumps([identity, file.url, file.version, *digests_of(file.contents)])
        self.contents = file.contents
        self.place = place_of(file)
        self.file = file
        self.layout = self._find_layout() if layout is None else layout
        self.runs = self.layout.runs.tolist()
        self.rows_at_once = rows_held_at_once(self.layout.held_bytes, sum(self.runs))

    @abstractmethod
    def _find_layout(self) -> Layout:
        """Look into the file; ContentError: it cannot be read as documents."""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of some rows of one run: see `Shard`."""

    def rows_of_part(self, part: int) -> range | None:
        """Tell the rows of the runs that a part of the file touches."""
        first, stop = spans_of_part(self.layout.starts, self.file, part)
        return range(sum(self.runs[:first]), sum(self.runs[:stop]))

    def _run_of(self, row: int) -> tuple[int, int]:
        """Number of the run of a row, and the first row of that run."""
        run = int(np.searchsorted(self._ends, row, side="right"))
        return run, int(self._ends[run]) - self.runs[run]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(np.array(self.runs, dtype=np.int64))

    def _cached_index(self, cache_dir: Path, make: Callable[[], NDArray[np.int64]], *keys: str) -> NDArray[np.int64]:
        """Give what `make` finds in the file, or raises as ContentError, from the cache where it is there.

        A second start needs no look at the file, which may have to be fetched from far away. `keys` of the config are
        those that the hint of a ContentError may name: another source reads the same file under others.
        """
        # Identity alone is of the ends of a file, so that another version is another entry.
        name, refused = (_short_hash("\0".join((self.local_identity, *more))) for more in ((), keys))
        path, refusal = cache_dir / "index" / f"{name}.npy", cache_dir / "index" / f"{refused}.json"

        def make_or_refuse() -> NDArray[np.int64]:
            # A refusal that is damaged, or not there, counts for nothing.
            with contextlib.suppress(OSError, ValueError, TypeError):
                raise ContentError(**json.loads(refusal.read_bytes()))
            try:
                return make()
            except ContentError as error:
                told = error.texts() | {"text_column": error.text_column}
                write_atomically(refusal, json.dumps(told).encode())
                raise

        return cached_array(path, make_or_refuse)


def place_of(file: DataFile) -> tuple[str, str] | None:
    """Give `Shard.place` of a file."""
    return None if file.contents is not None or is_in_identity(file) else (file.url, file.version)


def _short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def spans_of_part(starts: NDArray[np.int64], file: DataFile, part: int) -> tuple[int, int]:
    """Number of the first span that a part of a file touches, and the one after the last; `starts` are in bytes."""
    size = part_bytes(file.size_bytes)
    first = max(int(np.searchsorted(starts, part * size, side="right")) - 1, 0)
    return first, max(int(np.searchsorted(starts, (part + 1) * size)), first + 1)


def rows_held_at_once(num_bytes: int, num_rows: int) -> int:
    """Give the number of rows of a file to read together, so that a lane holds about `HELD_BYTES`."""
    return min(max(HELD_BYTES * num_rows // max(num_bytes, 1), 1), MOST_ROWS_AT_ONCE)


def expands_too_much(packed_bytes: int, unpacked_bytes: int, *, allowed_bytes: int) -> bool:
    """Whether a file unpacks to more than `allowed_bytes` and 1,000 times its size: it is made to fill a memory."""
    return unpacked_bytes > max(_MOST_EXPANSION * packed_bytes, allowed_bytes)


def check_size(size_bytes: int, *, where: str) -> BadRow | None:
    """Refuse a row that would not fit into memory many times over."""
    if size_bytes <= MOST_ROW_BYTES:
        return None
    return BadRow(
        ContentError("the row is too large", where=where, found=f"{size_bytes:,} bytes", allowed=f"{MOST_ROW_BYTES:,}")
    )


def check_text(value: object, *, where: str) -> str | BadRow:
    """Give `value` if it is text; half of a surrogate pair, which JSON allows and UTF-8 does not, becomes `?`."""
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__}: {value!r:.{_SHOWN_BYTES}}"
        return BadRow(ContentError("the text column holds no text", where=where, found=found, allowed="a string"))
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def decode_text(data: bytes | memoryview, *, where: str, first_byte: int = 0, errors: str = "strict") -> str | BadRow:
    """Decode bytes; `first_byte` is their place in the file, for messages. `errors="replace"` takes any bytes."""
    try:
        return str(data, "utf-8", errors)
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.end]
        place = f"{where}, byte {first_byte + error.start} of the text"
        return BadRow(ContentError("not UTF-8", where=place, found=found))


def damage(what: str, error: Exception, *, where: str) -> ContentError:
    """Make an error of what a library found wrong with a file; raise one where the network or this machine failed."""
    if isinstance(error.__cause__, DataError):
        raise error.__cause__
    if isinstance(error, MemoryError):
        raise ResourceError("there is not enough memory to read it", where=where, found=first_line(error)) from error
    # A seek to a place that a damaged file names is an invalid argument.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise DataError(f"cannot be read: {error.strerror}", where=where) from error
    return ContentError(f"{what}: {first_line(error)}", where=where)
