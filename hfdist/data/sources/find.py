"""From a source's config to its shards, in canonical order, all checked before training."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from hfdist.config.data import BadRows, DataConfig, SourceKind
from hfdist.data.sources.arrow_file import ArrowShard
from hfdist.data.sources.base import ContentError, Shard
from hfdist.data.sources.dataset import open_hub
from hfdist.data.sources.parquet_file import ParquetShard
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.stdlib import open_docstrings, open_standard_library
from hfdist.data.sources.text import JsonLinesShard, TextShard
from hfdist.data.sources.tokenfile import open_token_shards
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile, LocalFile
from hfdist.data.storage.find import find_files
from hfdist.data.storage.identity import MOST_BYTES, identify_all, read_contents
from hfdist.data.threads import thread_map
from hfdist.errors import DataError
from hfdist.processes.startup import counted

logger = logging.getLogger(__name__)

SUFFIXES = (".parquet", ".arrow", ".feather", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".txt")


def find_shards(name: str, data: DataConfig, cache_dir: Path, *, section: str = "data.sources") -> Sequence[Shard]:
    """Open the shards of the source `name`; `section` of the config holds it. Bad files are left out or refused.

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
            return open_standard_library(cache)
        case SourceKind.docstrings:
            return open_docstrings(cache)
        case SourceKind.hub:
            return [open_hub(key, config, data, cache_dir=cache.folder)]
        case SourceKind.tokens:
            assert config.path is not None  # checked with the config
            return open_token_shards(config.path, key, cache.folder)
        case SourceKind.files:
            assert config.path is not None
            files = find_files(config.path, key=key, suffixes=SUFFIXES, cache=cache)
            return _open_all(files, RowReader.of(config, data, f"{section}.{name}"), cache, data.on_bad_rows, key)


def _open_all(files: Sequence[DataFile], rows: RowReader, cache: FileCache, on_bad: BadRows, key: str) -> list[Shard]:
    """Open files in order; bad ones stop the run, or are left out."""

    def try_open(file: DataFile, identity: str) -> Shard | ContentError:
        try:
            return _open(file, identity, rows, cache)
        except ContentError as error:
            return error

    identities = identify_all(files, rows.key)
    if sum(file.size_bytes for file in files) <= MOST_BYTES:
        read_contents([file for file in files if _is_read_at_a_start(file)], cache.folder)
    shards: list[Shard] = []
    left_out: list[str] = []
    first_by_identity: dict[str, DataFile] = {}
    all_opened = zip(files, thread_map(try_open, files, identities), strict=True)
    for file, opened in counted(all_opened, len(files), f"files of {key}"):
        if not isinstance(opened, ContentError):
            first = first_by_identity.setdefault(opened.identity, file)
            # Text files are documents, which may repeat, as rows may.
            is_document = isinstance(opened, TextShard) and opened.runs == [1]
            if first is file or is_document or _digest(first) != _digest(file):
                shards.append(opened)
                continue
            opened = ContentError("the file is there twice", where=file.url, found=first.url)
        if on_bad is BadRows.error:
            if opened.text_column is not None:
                others = [one for _, one in all_opened]
                opened.hint = _name_texts(opened.text_column, [*shards, *others], rows)
            # Of one file alone, nothing would be left.
            if len(files) > 1:
                skip = "data.on_bad_rows=skip leaves the file out"
                opened.hint = f"{opened.hint}, or {skip}" if opened.hint else skip
            raise opened
        logger.warning("%s is left out: %s", file.url, opened.what)
        left_out.append(f"{file.url}: {opened.what}")
    if not shards:
        found = f"{len(left_out)} left out; the first: {left_out[0]}"
        raise DataError("no file of the source can be read", where=key, found=found, hint=f"{key}=OTHER_FILES")
    return shards


def _name_texts(column: str, others: Sequence[Shard | ContentError], rows: RowReader) -> str:
    """Write the override for all files at once: another file may have another column, or the one that was asked for."""
    refused = [one for one in others if isinstance(one, ContentError)]
    columns = [column, *(one.text_column for one in refused if one.text_column is not None)]
    return rows.name_texts(columns, has_asked=len(refused) < len(others))


def _open(file: DataFile, identity: str, rows: RowReader, cache: FileCache) -> Shard:
    if not file.size_bytes:
        raise ContentError("the file is empty", where=file.url, allowed="a document or more")
    shard: Shard
    if file.name.endswith(".parquet"):
        shard = ParquetShard(file, identity, rows)
    elif file.name.endswith((".arrow", ".feather")):
        shard = ArrowShard(file, identity, rows, cache)
    elif file.name.endswith(".txt"):
        shard = TextShard(file, identity, cache)
    else:
        shard = JsonLinesShard(file, identity, rows, cache)
    if not sum(shard.runs):
        raise ContentError("the file has no rows", where=file.url)
    return shard


def _is_read_at_a_start(file: DataFile) -> bool:
    """Whether a start may read all of it: it is here, or is fetched for its index anyway."""
    return isinstance(file, LocalFile) or not file.name.endswith((".parquet", ".txt"))


def _digest(file: DataFile) -> bytes:
    with file.local() as path, path.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()
