"""The shards of a source, found by its config in canonical order: opened and checked now, or taken from an index."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from hfdist.config.data import BadRows, DataConfig, SourceKind
from hfdist.config.override_text import in_shell
from hfdist.data.sources.base import ContentError, FileShard
from hfdist.data.sources.dataset import open_hub
from hfdist.data.sources.index_file import index_folder
from hfdist.data.sources.indexed import IndexedShards
from hfdist.data.sources.open_file import LINES, SUFFIXES, is_one_document, open_file
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.shards import OpenShards, Shards
from hfdist.data.sources.stdlib import open_docstrings, open_standard_library
from hfdist.data.sources.tokenfile import open_token_shards
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile, LocalFile
from hfdist.data.storage.find import find_files
from hfdist.data.storage.identity import MOST_BYTES, identify_all, read_contents
from hfdist.data.threads import thread_map
from hfdist.errors import DataError
from hfdist.processes.startup import counted

logger = logging.getLogger(__name__)

_MOST_LINES_BYTES = 1 << 38
"""Bytes of JSON lines of which a start looks for the rows: at 2 to 4 CPU seconds a GB a quarter of an hour."""
_MANY_FILES = 10_000
"""Number of files of which a start proposes an index: to open so many takes seconds of each rank."""


def find_shards(
    name: str, data: DataConfig, cache_dir: Path, *, section: str = "data.sources", reads_all: bool = False
) -> Shards:
    """Give the shards of the source `name`, which stands in the config's `section`; bad files are left out or refused.

    With `reads_all`, JSON lines of any size are read for their rows: the caller reads all of them anyway.

    Raises:
        ConfigError: the config names something that does not exist.
        DataError: a file cannot be reached, or none of them can be read.
        ContentError: a bad file, where `data.on_bad_rows` is to stop.
    """
    config = data.sources[name]
    key = f"{section}.{name}.path"
    cache = FileCache(cache_dir, data.file_cache_bytes)
    match config.kind:
        case SourceKind.stdlib:
            return OpenShards(open_standard_library(cache))
        case SourceKind.docstrings:
            return OpenShards(open_docstrings(cache))
        case SourceKind.hub:
            return OpenShards([open_hub(key, config, data, cache_dir=cache.folder)])
        case SourceKind.tokens:
            assert config.path is not None  # checked with the config
            return OpenShards(open_token_shards(config.path, key, cache.folder))
        case SourceKind.files:
            assert config.path is not None
            rows = RowReader.of(config, data, f"{section}.{name}")
            if config.index is not None:
                return IndexedShards(config.index, config.path, rows, cache, data.on_bad_rows, f"{section}.{name}")
            files = find_files(config.path, key=key, suffixes=SUFFIXES, cache=cache)
            if not reads_all:
                _check_size(files, rows)
            on_bad = BadFilePolicy(data, key, len(files))
            shards = list(open_all(files, rows, cache, on_bad))
            on_bad.check_some(bool(shards))
            return OpenShards(shards)


def _check_size(files: Sequence[DataFile], rows: RowReader) -> None:
    """Refuse JSON lines that each machine would have to read for too long; propose an index of many files."""
    size_bytes = sum(file.size_bytes for file in files if file.name.endswith(LINES))
    if size_bytes > _MOST_LINES_BYTES:
        made = in_shell(f"{rows.section}.index", f"runs/NAME/index/{index_folder(rows.section)}")
        command = f"{rows.index_command} once with the same overrides and run.name=NAME"
        raise DataError(
            "so many JSON lines must be read whole before training, and each machine would do it",
            where=f"{rows.section}.path",
            found=f"{size_bytes:,} bytes",
            allowed=f"{_MOST_LINES_BYTES:,}",
            hint=f"{command}, then {made}; or hfdist pretokenize",
        )
    if len(files) > _MANY_FILES:
        logger.info(
            "%s: %s files are opened one by one; %s does it once, for all starts of all ranks",
            rows.section, f"{len(files):,}", rows.index_command,
        )  # fmt: skip


def open_all(
    files: Sequence[DataFile], rows: RowReader, cache: FileCache, on_bad: BadFilePolicy
) -> Iterator[FileShard]:
    """Open files in order; `on_bad` gets the files that cannot be read, and those that are there twice."""
    read_at_a_start(files, cache)
    repeats = Repeats()
    for file, opened in open_each(files, rows, cache, on_bad):
        first = repeats.first_of(file, opened.identity, opened.runs)
        if first is None:
            yield opened
        else:
            on_bad(file, ContentError("the file is there twice", where=file.url, found=first.url))


def read_at_a_start(files: Sequence[DataFile], cache: FileCache, some: Sequence[DataFile] | None = None) -> None:
    """Hash the contents of `files`, or of `some` of them, unless all files together are too large to be read."""
    if sum(file.size_bytes for file in files) > MOST_BYTES:
        return
    wanted = files if some is None else some
    read_contents([file for file in wanted if _is_read_at_a_start(file)], cache.folder)


def open_each(
    files: Sequence[DataFile], rows: RowReader, cache: FileCache, on_bad: BadFilePolicy
) -> Iterator[tuple[DataFile, FileShard]]:
    """Open files in order, in several threads; `on_bad` gets a file that cannot be read, and may raise."""

    def try_open(file: DataFile, identity: str) -> FileShard | ContentError:
        try:
            return open_file(file, identity, rows, cache)
        except ContentError as error:
            return error

    identities = identify_all(files, rows.key)
    all_opened = zip(files, thread_map(try_open, files, identities), strict=True)
    # Whether a file before has the column of texts that was asked for.
    fits = False
    for file, opened in counted(all_opened, len(files), f"files of {on_bad.key}"):
        if isinstance(opened, ContentError):
            if on_bad.stops and opened.text_column is not None:
                others = [one for _, one in all_opened]
                opened.hint = _name_texts(opened.text_column, others, rows, fits=fits)
            on_bad(file, opened)
        else:
            fits = True
            yield file, opened


class BadFilePolicy:
    """What becomes of a file that cannot be read: it stops the run, or is left out and noted."""

    def __init__(self, data: DataConfig, key: str, num_files: int) -> None:
        self.key, self.stops = key, data.on_bad_rows is BadRows.error
        self._is_alone = num_files == 1
        self.left_out: list[str] = []
        """Address of each file that is left out, and why."""

    def __call__(self, file: DataFile, error: ContentError) -> None:
        """Raise the error with a hint, or note that the file is left out."""
        if self.stops:
            # If the file is the only one, nothing would be left without it.
            if not self._is_alone:
                skip = "data.on_bad_rows=skip leaves the file out"
                error.hint = f"{error.hint}, or {skip}" if error.hint else skip
            raise error
        logger.warning("%s is left out: %s", file.url, error.what)
        self.left_out.append(f"{file.url}: {error.what}")

    def check_some(self, is_any: bool) -> None:
        """Raise a DataError where all files are left out."""
        if not is_any:
            found = f"{len(self.left_out)} left out; the first: {self.left_out[0]}"
            raise DataError(
                "no file of the source can be read", where=self.key, found=found, hint=f"{self.key}=OTHER_FILES"
            )


class Repeats:
    """The files that were seen so far, by which one that is there twice is found."""

    def __init__(self) -> None:
        self._first_by_identity: dict[str, DataFile] = {}

    def first_of(self, file: DataFile, identity: str, runs: Sequence[int]) -> DataFile | None:
        """Give the file before this one with the same contents; None: there is none, or the file is one document."""
        first = self._first_by_identity.setdefault(identity, file)
        if first is file or is_one_document(file.name, list(runs)):
            return None
        # An identity may be of the ends of a file alone.
        return first if _digest(first) == _digest(file) else None


def _name_texts(column: str, others: Sequence[FileShard | ContentError], rows: RowReader, *, fits: bool) -> str:
    """Write the override that names the text columns of all files: `column`, and those of the `others`.

    `fits`: whether a file before these has the column that was asked for, so that it stays.
    """
    refused = [one for one in others if isinstance(one, ContentError)]
    columns = [column, *(one.text_column for one in refused if one.text_column is not None)]
    return rows.name_texts(columns, has_asked=fits or len(refused) < len(others))


def _is_read_at_a_start(file: DataFile) -> bool:
    """Whether a start may read all of a file: it is on this machine, or is fetched for its index anyway."""
    return isinstance(file, LocalFile) or not file.name.endswith((".parquet", ".txt"))


def _digest(file: DataFile) -> bytes:
    """Hash all that a file holds."""
    with file.local() as path, path.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()
