"""Files opened as shards: the ending of a file's name says of which kind the shard is."""

from __future__ import annotations

from hfdist.data.sources.arrow_file import ArrowShard
from hfdist.data.sources.base import ContentError, FileShard, Layout
from hfdist.data.sources.parquet_file import ParquetShard
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.text import JsonLinesShard, TextShard
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
"""Endings of JSON lines, which must be read whole to know where their rows are."""
SUFFIXES = (".parquet", ".arrow", ".feather", *LINES, ".txt")
"""Endings of all files that are read."""


def open_file(
    file: DataFile, identity: str, rows: RowReader, cache: FileCache, layout: Layout | None = None
) -> FileShard:
    """Open a file as a shard; without a `layout` its rows are found now.

    ContentError: the file is empty, has no rows, or cannot be read as documents.
    """
    if not file.size_bytes:
        raise ContentError("the file is empty", where=file.url, allowed="a document or more")
    shard: FileShard
    if file.name.endswith(".parquet"):
        shard = ParquetShard(file, identity, rows, layout)
    elif file.name.endswith((".arrow", ".feather")):
        shard = ArrowShard(file, identity, rows, cache, layout)
    elif file.name.endswith(".txt"):
        shard = TextShard(file, identity, cache, layout)
    else:
        shard = JsonLinesShard(file, identity, rows, cache, layout)
    if not sum(shard.runs):
        raise ContentError("the file has no rows", where=file.url)
    return shard


def is_one_document(name: str, runs: list[int]) -> bool:
    """Whether a file is one document, as small text files are: documents may be there twice, other files may not."""
    return name.endswith(".txt") and runs == [1]
