"""The shards of a source that has an index: the index is mapped, and a file is opened when a row of it is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.config.data import BadRows
from hfdist.config.override_text import in_shell
from hfdist.config.paths import expand_user
from hfdist.data.cache import digest_of
from hfdist.data.sources.base import FilePlace, FileShard, Layout
from hfdist.data.sources.changed_rows import changed_rows
from hfdist.data.sources.index_file import (
    FILES,
    SCHEMA,
    STARTS,
    SUMMARY,
    Entry,
    Summary,
    check_lines,
    damaged_index,
    hash_of,
    index_folder,
    integer_column,
    map_starts,
    read_files,
    read_summary,
    runs_of,
)
from hfdist.data.sources.open_file import LINES, open_file
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.shards import ShardFacts, Shards
from hfdist.data.sources.text import MOST_DOCUMENT_BYTES
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import INDEX_AGAIN, SAMPLE_BYTES, DataFile, LocalFile, RemoteFile
from hfdist.data.storage.find import root_of
from hfdist.data.storage.identity import Contents, identify, is_in_identity, read_contents
from hfdist.data.storage.network import Details
from hfdist.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_MOST_OPEN = 1024
"""Number of shards that a process keeps: a shard has a layout, and no open file."""
_DIGITS = 16
"""Hexadecimal digits of the hash of a part."""
_CHUNK = 1 << 16
"""Number of files of which JSON is made at a time."""


class IndexedShards(Shards):
    """The shards of a source that `hfdist index` has indexed; no file is touched before a row of it is read."""

    holds_tokens = False

    def __init__(
        self, folder: str, path: str, rows: RowReader, cache: FileCache, on_bad: BadRows, section: str
    ) -> None:
        """Map an index.

        Args:
            folder: Folder of the index.
            path: Path of the source, as when the index was made: a file, a folder, a glob or an address. It may have
                moved.
            rows: Reader of the source's rows.
            cache: Cache of remote files.
            on_bad: Whether files may be left out.
            section: Key of the source in the config, for messages.

        Raises:
            ConfigError: There is no index, or it was made for other columns.
            DataError: The index is damaged, or lacks files that could not be read.
        """
        self._folder, self._rows, self._cache = expand_user(folder), rows, cache
        summary = self._read_summary(folder, on_bad, f"{section}.index")
        self._batch = read_files(self._folder / FILES, summary.files_hash)
        if len(self._batch) == 0:
            raise damaged_index(self._folder, "no file")
        self._starts = map_starts(self._folder / STARTS, self._batch)
        self._starts_ends = np.cumsum(integer_column(self._batch, "num_starts"))
        self._path, self._root = path, root_of(path)
        self._is_remote = scheme_of(path) not in (None, "file")
        self.runs = runs_of(self._batch)
        self.gives_examples = rows.gives_examples
        is_large = integer_column(self._batch, "size_bytes") > 2 * SAMPLE_BYTES
        has_no_contents = self._batch.column("contents").is_null().to_numpy(zero_copy_only=False)
        self.has_places = bool((is_large & has_no_contents).any())
        self.local_digest = digest_of([summary.files_hash, self._root])
        self._kept = lru_cache(maxsize=_MOST_OPEN)(self._open)

    def _read_summary(self, folder: str, on_bad: BadRows, key: str) -> Summary:
        """Read the summary of the index, and check that it is what the config asks for; `key` is that of `folder`."""
        summary = read_summary(self._folder / SUMMARY)
        if summary is None:
            name = index_folder(self._rows.section)
            hint = f"{self._rows.index_command} with the same overrides, then {key}=runs/NAME/index/{name}"
            if (self._folder / name / SUMMARY).is_file():
                hint = in_shell(key, f"{folder}/{name}")
            raise ConfigError("there is no finished index", where=key, found=folder, hint=hint)
        if summary.rows_key != self._rows.key:
            what = "the index was made for other columns, or another format"
            hint = f"{self._rows.index_command} with the same overrides, and another run.name"
            raise ConfigError(what, where=key, found=summary.rows_key, allowed=self._rows.key, hint=hint)
        if summary.left_out:
            if on_bad is BadRows.error:
                found = f"{len(summary.left_out)} left out; the first: {summary.left_out[0]}"
                hint = "data.on_bad_rows=skip"
                raise DataError("the index lacks files that could not be read", where=key, found=found, hint=hint)
            logger.warning("%s: %d files are left out, such as %s", key, len(summary.left_out), summary.left_out[0])
        return summary

    def open(self, number: int) -> FileShard:
        """Open the shard of a number; DataError: its file is gone, or has changed since it was indexed."""
        return self._kept(number)

    def facts(self) -> Iterator[ShardFacts]:
        """Give what the index knows of each shard; no file is opened."""
        rows_per_shard = self.runs.rows_per_shard
        for start in range(0, len(self), _CHUNK):
            chunk = self._batch.slice(start, _CHUNK)
            columns = (chunk.column(name).to_pylist() for name in ("name", "identity", "place", "version"))
            rows = rows_per_shard[start : start + _CHUNK].tolist()
            sizes = integer_column(chunk, "size_bytes").tolist()
            found = zip(*columns, rows, sizes, chunk.column("contents"), strict=True)
            for name, identity, place, version, num_rows, size_bytes, contents in found:
                values = contents.values.to_numpy() if contents.is_valid else None
                # A change of any other file would show in its contents, or in its identity.
                is_compared = values is not None or size_bytes <= 2 * SAMPLE_BYTES
                file_place = None if is_compared else FilePlace(self._url(place), version)
                yield ShardFacts(name, num_rows, identity, values, file_place)

    def name_of(self, number: int) -> str:
        """Give the name of a shard, from the index."""
        return str(self._batch.column("name")[number])

    def number_of(self, name: str) -> int | None:
        """Give the number of the shard of a name; None: the index has no such name."""
        number = pc.index(self._batch.column("name"), pa.scalar(name, pa.large_string())).as_py()
        return None if number < 0 else number

    def identities_as_json(self, source: str) -> Iterator[str]:
        """Give [source, name, rows, identity] of each shard as JSON, in pieces of many shards that a comma joins."""
        # Arrow joins whole columns, since there may be a million shards.
        begin = f'[{json.dumps(source)}, "'
        for chunk, rows in self._chunks():
            yield _joined([begin, _escaped(chunk), '", ', rows, ', "', chunk.column("identity"), '"]'])

    def contents_as_json(self, source: str) -> Iterator[str]:
        """Give ["SOURCE:NAME", rows, identity, parts] of each shard as JSON, in pieces that a comma joins."""
        begin = f"[{json.dumps(source)[:-1]}:"
        for chunk, rows in self._chunks():
            yield _joined(
                [begin, _escaped(chunk), '", ', rows, ', "', chunk.column("identity"), '", ', _parts(chunk), "]"]
            )

    def _chunks(self) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Give neighbouring shards of the index at a time, each time with their numbers of rows as texts."""
        rows = pa.array(self.runs.rows_per_shard)
        for start in range(0, len(self), _CHUNK):
            yield self._batch.slice(start, _CHUNK), rows.slice(start, _CHUNK).cast(pa.large_string())

    def _address(self, place: str) -> str:
        """Give the path or the address of a file, by its place in the source."""
        if not self._is_remote:
            # The file has its address in this form.
            return str(Path(self._root, place))
        return f"{self._root}/{place}" if place else self._path

    def _url(self, place: str) -> str:
        """Give the address of a file for messages, without secrets."""
        return redact(self._address(place)) if self._is_remote else self._address(place)

    def _open(self, number: int) -> FileShard:
        entry = Entry(**{name: self._batch.column(name)[number].as_py() for name in SCHEMA.names})
        file = self._file(entry)
        stop = int(self._starts_ends[number])
        starts = self._starts[stop - entry.num_starts : stop]
        layout = Layout(np.array(entry.runs, dtype=np.int64), starts, entry.held_bytes)
        self._check_starts(starts, entry)
        was = None if entry.contents is None else np.array(entry.contents, dtype=np.uint64)
        if file.version != entry.version:
            self._check_same(file, entry, layout, was)
        file.contents = was
        return open_file(file, entry.identity, self._rows, self._cache, layout)

    def _check_starts(self, starts: NDArray[np.int64], entry: Entry) -> None:
        """Raise a DataError where the starts that the index has of a file cannot be those of its rows or runs."""
        try:
            if hash_of(starts) != entry.starts_hash:
                raise ValueError("another hash of its starts")
            is_text = entry.name.endswith(".txt")
            if is_text or entry.name.endswith(LINES):
                most_bytes = MOST_DOCUMENT_BYTES if is_text else None
                check_lines(starts, entry, is_packed=entry.name.endswith((".gz", ".zst")), most_bytes=most_bytes)
            elif len(starts) != len(entry.runs):
                raise ValueError("other starts than runs")
        except ValueError as error:
            raise damaged_index(self._folder, f"{entry.name}: {error}") from error

    def _file(self, entry: Entry) -> DataFile:
        """Give a file as the index knows it; a remote file is not asked for before it is fetched."""
        plain = PurePosixPath(unquote(entry.place) if self._is_remote else entry.place)
        # Names on a disk may hold any characters; those of a listing may not.
        is_odd = not (entry.place + entry.name).isprintable() if self._is_remote else entry.place != entry.name
        if is_odd or ".." in plain.parts or plain.is_absolute() or "\0" in entry.place:
            raise damaged_index(self._folder, f"a file outside the source: {entry.place!r}")
        if self._is_remote:
            details = Details(entry.size_bytes, entry.version)
            remote = RemoteFile(self._address(entry.place), entry.name, details, self._cache)
            remote.is_indexed = True
            return remote
        path = Path(self._root, entry.place)
        if not path.is_file():
            raise DataError("a file of the index is gone", where=str(path), hint=INDEX_AGAIN)
        file = LocalFile(path, entry.name)
        if file.size_bytes != entry.size_bytes:
            found, allowed = f"{file.size_bytes:,} bytes", f"{entry.size_bytes:,}"
            what = "has changed since it was indexed"
            raise DataError(what, where=file.url, found=found, allowed=allowed, hint=INDEX_AGAIN)
        file.is_indexed = True
        return file

    def _check_same(self, file: DataFile, entry: Entry, layout: Layout, was: Contents | None) -> None:
        """Compare a file of another version with the index; `was`: hashes of its parts. DataError: it differs."""
        if was is not None:
            read_contents([file], self._cache.folder)
        now = file.contents
        # The identity of any other file says nothing of its middle.
        is_known = was is not None or is_in_identity(file)
        is_same = was is None or (now is not None and np.array_equal(now, was))
        if not (is_known and is_same) or identify(file, self._rows.key) != entry.identity:
            shard = open_file(file, entry.identity, self._rows, self._cache, layout)
            where = f"{file.url}{changed_rows(shard, was, now)}"
            raise DataError("has changed since it was indexed", where=where, hint=INDEX_AGAIN)


def _joined(columns: Sequence[str | pa.Array]) -> str:
    """Join columns of texts row by row, and the rows by commas."""
    return ", ".join(_by_rows(columns).to_pylist())


def _by_rows(columns: Sequence[str | pa.Array]) -> pa.Array:
    """Join columns of texts row by row; a single text is repeated in each row."""
    texts = [pa.scalar(one, pa.large_string()) if isinstance(one, str) else one for one in [*columns, ""]]
    return pc.binary_join_element_wise(*texts)


def _escaped(chunk: pa.RecordBatch) -> pa.Array:
    """Give the names of files escaped as JSON wants it, without quotes around them."""
    names = chunk.column("name")
    if not pc.any(pc.match_substring_regex(names, r"[^ !#-\[\]-~]")).as_py():
        return names
    return pa.array([json.dumps(name)[1:-1] for name in names.to_pylist()], pa.large_string())


def _parts(chunk: pa.RecordBatch) -> pa.Array:
    """Give the contents of files as JSON has them: a text of the hexadecimal digits of all hashes, or null."""
    column = chunk.column("contents")
    # A slice of a column has the values of the whole one: its offsets tell which are of this chunk.
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]]
    digits = values.astype("<u8", copy=False).tobytes().hex().encode()
    text_offsets = pa.py_buffer((offsets - offsets[0]) * _DIGITS)
    texts = pa.LargeStringArray.from_buffers(len(column), text_offsets, pa.py_buffer(digits))
    return pc.if_else(column.is_valid(), _by_rows(['"', texts, '"']), pa.scalar("null", pa.large_string()))
