"""The interface of a shard, a file of rows, and the checks of rows and files that all kinds of shards share."""

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
"""Bytes of the largest row that is read."""
HELD_BYTES = 2 << 20
"""Bytes of decoded rows that each reader of a stream may hold: a run of a file may have a million rows."""
MOST_ROWS_AT_ONCE = 1024
_SHOWN_BYTES = 80
_MOST_EXPANSION = 1000


class ContentError(DataError):
    """The error of a row or a file that cannot be read as documents; `data.on_bad_rows` says what happens then.

    `text_column` is a column that may hold the texts, where none has the name that was asked for. The other arguments
    are those of `DataError`.
    """

    def __init__(self, what: str, *, text_column: str | None = None, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.text_column = text_column


@dataclass(frozen=True)
class BadRow:
    """A row that gives no text, with the error that says why; `data.on_bad_rows` says what happens then."""

    error: DataError


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A document as tokens."""

    tokens: NDArray[np.int32]
    """Tokens of the document, with the end-of-text token at the end; shape [tokens]. May be a read-only view."""
    text_digest: int
    """Hash of the document's text, which decides whether it is held out."""


class FilePlace(NamedTuple):
    """The address and the version of a file, which may tell of a change that nothing else does."""

    url: str
    version: str


class Shard(Protocol):
    """Rows that are read together: a file, a token file, or a dataset in memory."""

    name: str
    """Path of the file relative to its source, or an id of the dataset."""
    identity: str
    """Digest of what is read of the rows, the same on every machine; known without reading all of them."""
    runs: Sequence[int]
    """Numbers of rows of the runs, in order. The rows of a run are neighbours, and cheap to read together."""
    gives_examples: bool
    """Whether texts are examples for fine-tuning, in canonical JSON, and not plain text."""
    rows_at_once: int
    """Number of rows of a run to ask for together; 1 where one row costs no more alone."""

    @property
    def local_identity(self) -> str:
        """`identity` with address, version and contents, for this machine's caches: `identity` may miss a change."""

    @property
    def contents(self) -> NDArray[np.uint64] | None:
        """Hashes of the file's parts, in order, shape [parts]; None: `identity` has all of them, or none is known."""

    @property
    def place(self) -> FilePlace | None:
        """Address and version of the file; None: `identity` or `contents` tells of any change."""

    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of some rows of one run, in the order asked for; each may be made only when it is taken.

        DataError: the file has changed since it was opened, or cannot be read at all.
        """

    def rows_of_part(self, part: int) -> range | None:
        """Give the rows of which something lies in a part of `contents`; None: they are not known."""


class TokenShard(Shard, Protocol):
    """A shard that holds tokens instead of text."""

    def token_columns(self, rows: NDArray[np.int64]) -> TokenColumns:
        """Give the documents of some rows, shape [rows], in the order asked for."""


def holds_tokens(shard: Shard) -> TypeGuard[TokenShard]:
    """Whether a shard holds tokens instead of text."""
    return hasattr(shard, "token_columns")


class Layout(NamedTuple):
    """Where the rows of a file lie, as it must be known before a row is read."""

    runs: NDArray[np.int64]
    """Sizes of the runs, which are rows that are cheap to read together; shape [runs]."""
    starts: NDArray[np.int64]
    """First byte of each run, shape [runs]; or first byte of each row and the end of the last, shape [rows + 1]."""
    held_bytes: int
    """Bytes that all rows take in memory; `Shard.rows_at_once` follows from them."""


class FileShard(ABC):
    """A shard whose rows are in one file. A subclass finds the layout of its kind of file, and reads the rows."""

    runs: Sequence[int]

    def __init__(self, file: DataFile, identity: str, layout: Layout | None, *, gives_examples: bool = False) -> None:
        """Take a file with its layout; None: the layout is found now. ContentError: the file has none."""
        self.name, self.identity, self.gives_examples = file.name, identity, gives_examples
        self.local_identity = json.dumps([identity, file.url, file.version, *digests_of(file.contents)])
        self.contents = file.contents
        self.place = _place_of(file)
        self.file = file
        self.layout = self._find_layout() if layout is None else layout
        self.runs = self.layout.runs.tolist()
        self.rows_at_once = rows_held_at_once(self.layout.held_bytes, sum(self.runs))

    @abstractmethod
    def _find_layout(self) -> Layout:
        """Look into the file for its layout; ContentError: it cannot be read as documents."""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> Iterable[str | BadRow]:
        """Give the texts of some rows of one run, in the order asked for; a row that gives none is a `BadRow`."""

    def rows_of_part(self, part: int) -> range | None:
        """Give the rows of the runs that a part of the file touches; None: they are not known."""
        first, stop = spans_of_part(self.layout.starts, self.file, part)
        return range(sum(self.runs[:first]), sum(self.runs[:stop]))

    def _run_of(self, row: int) -> tuple[int, int]:
        """Give the number of the run that holds a row, and the first row of that run."""
        run = int(np.searchsorted(self._ends, row, side="right"))
        return run, int(self._ends[run]) - self.runs[run]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Row after the last one of each run; shape [runs]."""
        return np.cumsum(np.array(self.runs, dtype=np.int64))

    def _cached_index(self, cache_dir: Path, make: Callable[[], NDArray[np.int64]], *keys: str) -> NDArray[np.int64]:
        """Give the array that `make` finds in the file, from the cache where it is there.

        A second start needs no look at the file, which may have to be fetched from far away. So a ContentError of
        `make` is cached, too. `keys` of the config are those that its hint may name: another source reads the same
        file under other keys.
        """
        # `local_identity`, since `identity` is of the ends of a file alone: another version is another entry.
        index = cache_dir / "index" / f"{_short_hash(self.local_identity)}.npy"
        asked = "\0".join((self.local_identity, *keys))
        refusal = cache_dir / "index" / f"{_short_hash(asked)}.json"

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

        return cached_array(index, make_or_refuse)


def _place_of(file: DataFile) -> FilePlace | None:
    """Give `Shard.place` of a file."""
    if file.contents is not None or is_in_identity(file):
        return None
    return FilePlace(file.url, file.version)


def _short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def spans_of_part(starts: NDArray[np.int64], file: DataFile, part: int) -> tuple[int, int]:
    """Give the number of the first span of a file that a part touches, and the number after the last one.

    `starts` has the first byte of each span, shape [spans]; a part is a share of the file that has a hash of its own.
    """
    size = part_bytes(file.size_bytes)
    first = max(int(np.searchsorted(starts, part * size, side="right")) - 1, 0)
    stop = int(np.searchsorted(starts, (part + 1) * size))
    return first, max(stop, first + 1)


def rows_held_at_once(num_bytes: int, num_rows: int) -> int:
    """Give the number of rows to read together, so that they hold about `HELD_BYTES`; all rows take `num_bytes`."""
    rows = HELD_BYTES * num_rows // max(num_bytes, 1)
    return min(max(rows, 1), MOST_ROWS_AT_ONCE)


def expands_too_much(packed_bytes: int, unpacked_bytes: int, *, allowed_bytes: int) -> bool:
    """Whether a file unpacks to more than `allowed_bytes` and to more than 1,000 times its size: no text does."""
    return unpacked_bytes > max(_MOST_EXPANSION * packed_bytes, allowed_bytes)


def check_size(size_bytes: int, *, where: str) -> BadRow | None:
    """Give a bad row where the row is too large to be in memory many times; None: its size is allowed."""
    if size_bytes <= MOST_ROW_BYTES:
        return None
    return BadRow(
        ContentError("the row is too large", where=where, found=f"{size_bytes:,} bytes", allowed=f"{MOST_ROW_BYTES:,}")
    )


def check_text(value: object, *, where: str) -> str | BadRow:
    """Give `value` if it is text, else a bad row; half a surrogate pair, which UTF-8 lacks, becomes `?`."""
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__}: {value!r:.{_SHOWN_BYTES}}"
        return BadRow(ContentError("the text column holds no text", where=where, found=found, allowed="a string"))
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def decode_text(data: bytes | memoryview, *, where: str, first_byte: int = 0, errors: str = "strict") -> str | BadRow:
    """Decode UTF-8; bytes that are not give a bad row, or with `errors="replace"` replacement characters.

    `where` and `first_byte`, the place of the bytes in their file, are for messages.
    """
    try:
        return str(data, "utf-8", errors)
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.end]
        place = f"{where}, byte {first_byte + error.start} of the text"
        return BadRow(ContentError("not UTF-8", where=place, found=found))


def damage(what: str, error: Exception, *, where: str) -> ContentError:
    """Give the error of a file in which a library found something wrong.

    DataError, ResourceError: raised where not the file, but the network or this machine failed.
    """
    if isinstance(error.__cause__, DataError):
        raise error.__cause__
    if isinstance(error, MemoryError):
        raise ResourceError("there is not enough memory to read it", where=where, found=first_line(error)) from error
    # A seek to a place that a damaged file names is an invalid argument.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise DataError(f"cannot be read: {error.strerror}", where=where) from error
    return ContentError(f"{what}: {first_line(error)}", where=where)
