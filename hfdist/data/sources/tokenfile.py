"""Token files, which `recipes/pretokenize.py` writes and training reads in place.

    <folder>/meta.json             a record of each file; written last
             tokenizer/            the tokenizer that made the tokens
             00000.tokens          documents end to end, little-endian uint16 or uint32; of examples, uint32
                                   with the complements of context tokens
             00000.index.npy       int64, shape [rows + 1]: the first token of each document, and the end of the last
             00000.digests.npy     uint64, shape [rows]: the hash of each text, which decides whether it is held out

A file holds one shard of the corpus, or several small ones, row for row and in runs as they were, so that a run that
reads tokens has the order of one that reads the text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfdist.config.override_text import in_shell
from hfdist.config.paths import expand_user
from hfdist.data.cache import load_array
from hfdist.data.marks import ids_of
from hfdist.data.sources.base import BadRow, FilePlace, TokenRow, spans_of_part
from hfdist.data.sources.document_batch import TokenColumns
from hfdist.data.storage.files import LocalFile
from hfdist.data.storage.identity import MOST_BYTES, digests_of, read_contents
from hfdist.errors import ConfigError, DataError, first_line

VERSION = 1
META = "meta.json"
TOKENIZER = "tokenizer"
_MOST_ROWS_AT_ONCE = 1024
_HELD_BYTES = 8 << 20
"""Bytes of tokens that are read together."""
_NPY_HEADER_BYTES = 128
"""Bytes before the values of a .npy file of one axis, as numpy writes it."""
_NARROW_BYTES = 2
"""Bytes of a token in the narrower of the two types."""
_WRITE_AGAIN = "delete the folder and run recipes/pretokenize.py again"


@dataclass(frozen=True)
class OriginShard:
    """A shard of the corpus of which a token file was made."""

    source: str
    shard: str
    identity: str
    runs: list[int]


@dataclass(frozen=True)
class FileRecord:
    """The record of one token file in meta.json."""

    name: str
    rows: int
    tokens: int
    digest: str
    """Hash of what its three files hold: tokens, offsets and digests."""
    origins: list[OriginShard]
    """Shards that were tokenized into the file, in order; their runs sum to `rows`."""
    bad_rows: list[int]
    """Numbers of the rows that could not be read: they are empty documents in the file."""

    def origin(self, row: int) -> tuple[OriginShard, int]:
        """Give the shard from which a document was made, and the number of its row there; IndexError: no such row."""
        first = 0
        for origin in self.origins:
            stop = first + sum(origin.runs)
            if row < stop:
                return origin, row - first
            first = stop
        raise IndexError(row)


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    tokenizer_digest: str
    dtype: str
    """Type of the tokens: uint16 or uint32."""
    files: list[FileRecord]
    encoding: str
    """Digest of all that decides the tokens; it is `tokenizer_digest` unless they are of examples."""


class TokenFileShard:
    """The documents of one token file, which each process memory-maps when it is first used."""

    def __init__(
        self, folder: Path, record: FileRecord, meta: Meta, tokenizer: Callable[[], PreTrainedTokenizerBase]
    ) -> None:
        """Take a token file by its record; `tokenizer` loads the tokenizer that made it.

        DataError: one of its files is missing, or has another size than the record says.
        """
        self.name = record.name
        self.identity = record.digest
        self.runs: Sequence[int] = [rows for origin in record.origins for rows in origin.runs]
        mean_bytes = max(4 * record.tokens / max(record.rows, 1), 1)
        self.rows_at_once = min(max(int(_HELD_BYTES / mean_bytes), 1), _MOST_ROWS_AT_ONCE)
        self._record, self._tokenizer = record, tokenizer
        self._dtype = np.dtype(meta.dtype).newbyteorder("<")
        self.gives_examples = meta.encoding != meta.tokenizer_digest
        self._paths = paths_of(folder, record.name)
        for path, size_bytes in zip(self._paths, sizes_of(record, meta.dtype), strict=True):
            _check_size(path, size_bytes)
        self.files = [LocalFile(path, path.name) for path in self._paths]
        """The files of tokens, offsets and digests, in this order."""

    @property
    def contents(self) -> NDArray[np.uint64] | None:
        """Hashes of the parts of its three files, end to end, shape [parts]; None: they are not known."""
        found = [file.contents for file in self.files if file.contents is not None]
        return np.concatenate(found) if len(found) == len(self.files) else None

    @property
    def local_identity(self) -> str:
        """Identity for this machine's caches: `identity`, and hashes of what the files hold now."""
        return json.dumps([self.identity, *digests_of(self.contents)])

    @property
    def place(self) -> FilePlace | None:
        """Address of the tokens and versions of the three files; None: `contents` tells of any change."""
        if self.contents is not None:
            return None
        return FilePlace(self.files[0].url, " ".join(file.version for file in self.files))

    def rows_of_part(self, part: int) -> range | None:
        """Give the documents of which tokens lie in a part of `contents`; None: the part is of another file."""
        tokens = self.files[0]
        if tokens.contents is None or part >= len(tokens.contents):
            return None
        first, stop = spans_of_part(self._offsets * self._dtype.itemsize, tokens, part)
        return range(first, min(stop, self._record.rows))

    def token_columns(self, rows: NDArray[np.int64]) -> TokenColumns:
        """Give documents in the order asked for, without a copy of their tokens."""
        starts = self._offsets[rows]
        return TokenColumns(self._tokens, starts, self._offsets[rows + 1] - starts, self._digests[rows])

    def read_tokens(self, rows: Sequence[int]) -> list[TokenRow]:
        """Give documents in the order asked for, each with a copy of its tokens."""
        found = self.token_columns(np.array(rows, dtype=np.int64))
        spans = zip(found.starts.tolist(), found.lengths.tolist(), found.digests.tolist(), strict=True)
        return [
            TokenRow(found.tokens[start : start + length].astype(np.int32), digest) for start, length, digest in spans
        ]

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of documents, without special tokens; DataError: the tokenizer cannot be loaded."""
        return [self._decode(row.tokens) for row in self.read_tokens(rows)]

    def _decode(self, tokens: NDArray[np.int32]) -> str:
        # Special tokens in its text were split, so that only the ends are special.
        return str(
            self._tokenizer().decode(ids_of(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def _tokens(self) -> NDArray[np.integer]:
        if self._record.tokens == 0:
            return np.empty(0, dtype=self._dtype)
        # Complements of context tokens are negative in four signed bytes.
        dtype = self._dtype if self._dtype.itemsize == _NARROW_BYTES else np.dtype("<i4")
        # It becomes a plain array, since slices of a memmap cost ten times as much.
        return np.asarray(np.memmap(self._paths.tokens, dtype, "r"))

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        offsets = _load(self._paths.offsets, "<i8", self._record.rows + 1)
        if offsets[0] != 0 or offsets[-1] != self._record.tokens or (np.diff(offsets) < 0).any():
            raise _damaged(self._paths.offsets, None, "the index")
        return offsets

    @cached_property
    def _digests(self) -> NDArray[np.uint64]:
        return _load(self._paths.digests, "<u8", self._record.rows)


def load_saved(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved in a folder, without running code of the folder; DataError: that fails."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a parser raises on a damaged file
        raise DataError("the saved tokenizer cannot be loaded", where=str(folder), found=first_line(error)) from error


def open_token_shards(path: str, key: str, cache_dir: Path) -> list[TokenFileShard]:
    """Open the token files of the folder `path`, in order, and check them; `key` is the key of `path` in the config.

    ConfigError: there is no such folder. DataError: the folder is not finished, damaged, or of another version.
    """
    folder = expand_user(path)
    if not folder.is_dir():
        hint = "python recipes/pretokenize.py ..."
        raise ConfigError("there is no such folder of token files", where=key, found=path, hint=hint)
    meta = read_meta(folder)
    tokenizer = functools.cache(lambda: load_saved(folder / TOKENIZER))
    shards = [TokenFileShard(folder, record, meta, tokenizer) for record in meta.files]
    files = [file for shard in shards for file in shard.files]
    if sum(file.size_bytes for file in files) <= MOST_BYTES:
        read_contents(files, cache_dir)
    return shards


def check_tokenizer(path: str, digest: str, examples_digest: str) -> None:
    """Check that the token files in `path` hold what the tokenizer and the chat template of a run would make.

    `digest` is the run's `tokenizer_digest`; `examples_digest` is of all that decides tokens and targets of examples.

    ConfigError: the files were made with another tokenizer, or by another template.
    """
    meta = read_meta(expand_user(path))
    made_with = meta.tokenizer_digest
    if made_with != digest:
        raise ConfigError(
            f"the token files in {path} were made with another tokenizer",
            where="model.tokenizer",
            found=f"one with the digest {digest}",
            allowed=f"the one with the digest {made_with}",
            hint=in_shell("model.tokenizer.name", f"{path}/{TOKENIZER}"),
        )
    if meta.encoding not in (made_with, examples_digest):
        raise ConfigError(
            f"the examples in {path} were made into tokens with another data.chat or chat template",
            where="data.chat",
            hint="that data.chat, or make the token files again: recipes/pretokenize.py",
        )


def read_meta(folder: Path) -> Meta:
    """Read and check meta.json; DataError: it is missing, damaged, or of another version."""
    path = folder / META
    if not path.is_file():
        what = "the folder holds no token files, or they are not finished"
        hint = "the same recipes/pretokenize.py command again goes on where it stopped"
        raise DataError(what, where=str(path), found="nothing", hint=hint)
    values = read_json(path)
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        what, found, allowed = "the token files are of another version", f"version {version}", f"version {VERSION}"
        raise DataError(what, where=str(path), found=found, allowed=allowed, hint=_WRITE_AGAIN)
    try:
        return _parse_meta(values)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, str(error), "the file") from error


def parse_record(values: Any, number: int) -> FileRecord:
    """Make the record of the token file `number` of JSON; KeyError, TypeError or ValueError: it is no record of it."""
    origins = [OriginShard(**origin) for origin in values["origins"]]
    record = FileRecord(**{**values, "origins": origins})
    # The name is made here and compared: a name from a file never becomes a path.
    if record.name != name_of(number):
        raise ValueError(f"file {number} is called {record.name!r}")
    runs = [rows for origin in origins for rows in origin.runs]
    for count in (record.rows, record.tokens, *runs, *record.bad_rows):
        if type(count) is not int or count < 0:
            raise ValueError(f"file {number} has {count!r} where a number must be")
    texts = [record.digest, *(text for origin in origins for text in (origin.source, origin.shard, origin.identity))]
    if sum(runs) != record.rows or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"what is said about file {number} does not agree")
    return record


def name_of(number: int) -> str:
    """Give the name of a token file, without endings."""
    return f"{number:05d}"


class FilePaths(NamedTuple):
    """Paths of the three files of a token file."""

    tokens: Path
    offsets: Path
    digests: Path


class FileSizes(NamedTuple):
    """Sizes of the three files of a token file, in bytes."""

    tokens: int
    offsets: int
    digests: int


def paths_of(folder: Path, name: str) -> FilePaths:
    """Give the paths of a token file by its name."""
    return FilePaths(folder / f"{name}.tokens", folder / f"{name}.index.npy", folder / f"{name}.digests.npy")


def sizes_of(record: FileRecord, dtype: str) -> FileSizes:
    """Give the sizes that the files of a record must have; `dtype` is the type of the tokens."""
    return FileSizes(
        tokens=np.dtype(dtype).itemsize * record.tokens,
        offsets=_NPY_HEADER_BYTES + 8 * (record.rows + 1),
        digests=_NPY_HEADER_BYTES + 8 * record.rows,
    )


def read_json(path: Path) -> Any:
    """Read a small file of JSON; DataError: it cannot be read, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise _damaged(path, str(error), "the file") from error


def _damaged(path: Path, found: str | None, name: str = "a token file", allowed: str | None = None) -> DataError:
    return DataError(f"{name} is damaged", where=str(path), found=found, allowed=allowed, hint=_WRITE_AGAIN)


def _parse_meta(values: dict[str, Any]) -> Meta:
    """Make the content of meta.json of JSON; KeyError, TypeError or ValueError: a value cannot be."""
    if values["dtype"] not in ("uint16", "uint32") or not isinstance(values["tokenizer_digest"], str):
        raise ValueError(f"tokens of type {values['dtype']!r}")
    files = [parse_record(record, number) for number, record in enumerate(values["files"])]
    encoding = values.get("encoding", values["tokenizer_digest"])
    if not isinstance(encoding, str):
        raise ValueError(f"an encoding {encoding!r}")
    return Meta(values["tokenizer_digest"], values["dtype"], files, encoding)


def _check_size(path: Path, size_bytes: int) -> None:
    """Raise a DataError where a file is missing, or has another size."""
    found = path.stat().st_size if path.is_file() else None
    allowed = f"{size_bytes} bytes"
    if found is None:
        raise DataError("a token file is missing", where=str(path), allowed=allowed, hint=_WRITE_AGAIN)
    if found != size_bytes:
        raise _damaged(path, f"{found} bytes", allowed=allowed)


def _load(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """Map the array of a .npy file; DataError: it has not this type and the shape [length]."""
    try:
        array = load_array(path)
    except (ValueError, OSError, EOFError) as error:
        raise _damaged(path, str(error)) from error
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise _damaged(path, f"{array.dtype}, shape {array.shape}")
    return np.asarray(array)
