"""The making of the index of a source, in one process, or in several that share its files.

share 0 of 2    files 0 to n/2    part-0-of-2-{starts, files.arrow, index.json}  |   the last process joins the
share 1 of 2    files n/2 to n    part-1-of-2-{starts, files.arrow, index.json}  |   parts, and removes them
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hfdist.atomic_write import write_atomically
from hfdist.config.data import DataConfig, SourceConfig, SourceKind, cache_dir, read_shard
from hfdist.config.override_text import in_shell
from hfdist.data.cache import digest_of
from hfdist.data.documents.inventory import Inventory
from hfdist.data.sources.base import ContentError
from hfdist.data.sources.find import BadFilePolicy, Repeats, find_shards, open_each, read_at_a_start
from hfdist.data.sources.index_file import (
    FILES,
    STARTS,
    SUMMARY,
    Entry,
    Summary,
    index_folder,
    integer_column,
    map_starts,
    read_files,
    read_summary,
    table_of,
    write_files,
    write_summary,
)
from hfdist.data.sources.indexed import IndexedShards
from hfdist.data.sources.open_file import SUFFIXES
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.shards import Shards
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import INDEX_AGAIN, DataFile, RemoteFile
from hfdist.data.storage.find import find_files, root_of
from hfdist.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


def index_sources(data: DataConfig, folder: Path) -> None:
    """Index all sources that are files, each below `folder`, or compare a finished index with its files.

    Raises:
        ConfigError: No source is files.
        DataError: A file cannot be read, or has changed since it was indexed, or the parts do not fit together.
    """
    keys = sorted(key for key, source in data.all_sources.items() if source.kind is SourceKind.files)
    if not keys:
        found = ", ".join(f"{name}: {source.kind.value}" for name, source in data.sources.items())
        what, hint = "only files are indexed", "data=files data.sources.files.path=..."
        raise ConfigError(what, where="data.sources", found=found, hint=hint)
    folders = {key: folder / index_folder(key) for key in keys}
    finished = [_index(key, data, folders[key]) for key in keys]
    if all(finished):
        overrides = (in_shell(f"{key}.index", str(folders[key])) for key in keys)
        logger.info("the same command again compares the index with the files; train with: %s", " ".join(overrides))


def _index(key: str, data: DataConfig, folder: Path) -> bool:
    """Index a source, or the share of its files that `data.shard` names; give whether the index is finished."""
    config = replace(data.all_sources[key], index=None)
    assert config.path is not None  # checked with the config
    if read_summary(folder / SUMMARY) is not None:
        _compare(key, config, data, folder)
        return True
    rows, cache = RowReader.of(config, data, key), FileCache(cache_dir(data), data.file_cache_bytes)
    files = find_files(config.path, key=f"{key}.path", suffixes=SUFFIXES, cache=cache)
    _check_names(files, f"{key}.path")
    places = _places(files, config.path, f"{key}.path")
    listing = _Listing(rows.key, digest_of([[file.name, file.size_bytes, file.version] for file in files]))
    on_bad = BadFilePolicy(data, f"{key}.path", len(files))
    number, count = read_shard(data.shard)
    parts = [_Part(folder, part, count) for part in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    if parts[number].summary() is None or not parts[number].is_of(listing):
        share = files[number * len(files) // count : (number + 1) * len(files) // count]
        # Whether contents are hashed depends on the size of all files, so that shares agree.
        read_at_a_start(files, cache, share)
        opened = open_each(share, rows, cache, on_bad)
        entries = ((Entry.of(shard, places[file.name]), shard.layout.starts) for file, shard in opened)
        try:
            parts[number].write(entries, listing, on_bad)
        except FileNotFoundError:
            # Another process has finished the index meanwhile, and removed the parts.
            if read_summary(folder / SUMMARY) is None:
                raise
            return True
    missing = sum(part.summary() is None for part in parts)
    # Whoever came last meanwhile has joined the parts, and removed them.
    if missing and read_summary(folder / SUMMARY) is None:
        logger.info("%s: share %d of %d is done; %d are missing", folder, number, count, missing)
        return False
    if not missing:
        _join(parts, listing, {file.name: file for file in files}, on_bad, folder)
    return True


def _check_names(files: Sequence[DataFile], key: str) -> None:
    """Raise a DataError for a file name that an index cannot hold, before anything is read."""
    for file in files:
        try:
            file.name.encode()
        except UnicodeEncodeError as error:
            what, hint = "an index needs file names in UTF-8", "rename the file"
            raise DataError(what, where=key, found=repr(file.name), hint=hint) from error


def _places(files: Sequence[DataFile], path: str, key: str) -> dict[str, str]:
    """Give by name the place of each file: its address without that of the source. ConfigError: a file has none."""
    root = f"{root_of(path)}/"
    if len(files) == 1 and isinstance(files[0], RemoteFile) and files[0].address == path:
        return {files[0].name: ""}
    for file in files:
        if isinstance(file, RemoteFile) and not file.address.startswith(root):
            what, hint = "the store names a file by an address that is not below the source's", None
            if file.address.endswith(f"/{file.name}"):
                # The store itself writes the address so.
                hint = in_shell(key, file.address.removesuffix(f"/{file.name}") + path.removeprefix(root_of(path)))
            raise ConfigError(what, where=key, found=file.url, hint=hint)
    return {file.name: file.address.removeprefix(root) if isinstance(file, RemoteFile) else file.name for file in files}


def _compare(key: str, source: SourceConfig, data: DataConfig, folder: Path) -> None:
    """Read all files, and compare them with the index in `folder`; DataError: a file is new, gone, or has changed."""
    section, _, name = key.rpartition(".")
    assert source.path is not None
    cache = FileCache(cache_dir(data), data.file_cache_bytes)
    rows = RowReader.of(source, data, key)
    was = IndexedShards(str(folder), source.path, rows, cache, data.on_bad_rows, key)
    now = find_shards(name, replace(data, sources={name: source}), cache.folder, section=section, reads_all=True)
    changes = Inventory({name: now}).changes_from(Inventory({name: was})) or _touched(was, now)
    if changes:
        what = "the files have changed since they were indexed"
        raise DataError(what, where="; ".join(changes), hint=INDEX_AGAIN)
    logger.info("%s: %d files are as they were indexed", folder, len(was))


def _touched(was: Shards, now: Shards) -> list[str]:
    """Describe the files that are too large to be compared, and have another version; there may be none."""
    names: list[str] = []
    for old, new in zip(was.facts(), now.facts(), strict=True):
        if old.place is not None and new.place is not None and old.place.version != new.place.version:
            names.append(old.name)
    return [f"{names[0]}, and {len(names) - 1} more, by their times of change"] if names else []


class _Listing(NamedTuple):
    """What all parts of an index must have in common."""

    rows_key: str
    """Columns and format that are read of each row, as `RowReader.key` has them."""
    digest: str
    """Digest of the names, sizes and versions of all files."""


class _Part:
    """A part of an index, which one process makes of its share of the files."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._path = folder / f"part-{number}-of-{count}"

    def _file(self, name: str) -> Path:
        """Give the path of the part's file that corresponds to the index's file `name`."""
        return self._path.with_name(f"{self._path.name}-{name}")

    def summary(self) -> Summary | None:
        """Read the summary of the part; None: the part is not finished."""
        return read_summary(self._file(SUMMARY))

    def is_of(self, listing: _Listing) -> bool:
        """Whether the part is finished, and was made of these columns and files."""
        found = self.summary()
        return found is not None and _Listing(found.rows_key, found.listing) == listing

    def write(
        self, entries: Iterable[tuple[Entry, NDArray[np.int64]]], listing: _Listing, on_bad: BadFilePolicy
    ) -> None:
        """Write the entries of files with their starts, and last the summary."""
        found: list[Entry] = []

        def write_starts(out: BinaryIO) -> None:
            for entry, starts in entries:
                out.write(starts.astype("<i8", copy=False).tobytes())
                found.append(entry)

        write_atomically(self._file(STARTS), write_starts)
        files_hash = write_files(self._file(FILES), table_of(found))
        write_summary(
            self._file(SUMMARY),
            Summary(rows_key=listing.rows_key, listing=listing.digest, files_hash=files_hash, left_out=on_bad.left_out),
        )

    def read(self, listing: _Listing) -> tuple[pa.RecordBatch, list[str]]:
        """Give the entries, and the files that are left out; DataError: the part is damaged, or of other files."""
        found = self.summary()
        if found is None or not self.is_of(listing):
            what = "a part of the index is of other files, or of other columns"
            hint = "start that share again: each must see the same files, of the same sizes and times"
            raise DataError(what, where=str(self._path), found=str(found), hint=hint)
        return read_files(self._file(FILES), found.files_hash), found.left_out

    def copy_starts(self, batch: pa.RecordBatch, is_kept: NDArray[np.bool_], out: BinaryIO) -> None:
        """Copy the starts of the files that are kept; `batch` has the part's entries, `is_kept` a value for each."""
        if is_kept.all():
            map_starts(self._file(STARTS), batch)
            with self._file(STARTS).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 22)
            return
        starts, counts = map_starts(self._file(STARTS), batch), integer_column(batch, "num_starts")
        ends = np.cumsum(counts)
        for number in np.flatnonzero(is_kept):
            out.write(starts[ends[number] - counts[number] : ends[number]].tobytes())


def _join(
    parts: Sequence[_Part], listing: _Listing, files: dict[str, DataFile], on_bad: BadFilePolicy, folder: Path
) -> None:
    """Write the index of all parts, and remove these. Several processes may do it at once: they write the same."""
    try:
        found = [part.read(listing) for part in parts]
        batches = [batch for batch, _ in found]
        on_bad.left_out = [file for _, left_out in found for file in left_out]
        is_kept = _without_repeats(pa.Table.from_batches(batches), files, on_bad)
        bounds = np.cumsum([0, *map(len, batches)])
        kept_by_part = [is_kept[start:stop] for start, stop in pairwise(bounds)]
        table = pa.Table.from_batches(batches).filter(pa.array(is_kept))
        on_bad.check_some(len(table) > 0)

        def write_starts(out: BinaryIO) -> None:
            for part, batch, mask in zip(parts, batches, kept_by_part, strict=True):
                part.copy_starts(batch, mask, out)

        write_atomically(folder / STARTS, write_starts)
        files_hash = write_files(folder / FILES, table)
    except (FileNotFoundError, DataError):
        # Another process may have joined the parts meanwhile, and removed them.
        if read_summary(folder / SUMMARY) is None:
            raise
        return
    left_out = sorted(on_bad.left_out)
    write_summary(
        folder / SUMMARY,
        Summary(rows_key=listing.rows_key, listing=listing.digest, files_hash=files_hash, left_out=left_out),
    )
    logger.info("%s: %d files, %d left out", folder, len(table), len(left_out))
    for path in folder.glob("part-*-of-*"):
        with suppress(FileNotFoundError):
            path.unlink()


def _without_repeats(table: pa.Table, files: dict[str, DataFile], on_bad: BadFilePolicy) -> NDArray[np.bool_]:
    """Tell which files of a table are kept, shape [files]: not those that hold the same as one before them."""
    is_kept = np.ones(len(table), dtype=bool)
    repeats = Repeats()
    # Only files whose identity is there several times can be alike.
    counts = pc.value_counts(table.column("identity"))
    several = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    for number in np.flatnonzero(pc.is_in(table.column("identity"), several).to_numpy()).tolist():
        name, identity, runs = (table.column(column)[number].as_py() for column in ("name", "identity", "runs"))
        first = repeats.first_of(files[name], identity, runs)
        if first is not None:
            on_bad(files[name], ContentError("the file is there twice", where=files[name].url, found=first.url))
            is_kept[number] = False
    return is_kept
