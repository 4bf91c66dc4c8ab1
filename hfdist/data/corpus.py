"""All documents of a run under one numbering, and the split into training and held-out ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hfdist.config.data import DataConfig
from hfdist.data.order import Permutation, cut_runs
from hfdist.data.sources.base import Shard
from hfdist.data.sources.find import find_shards
from hfdist.errors import DataError

_MIXED_BLOCKS = 1024
_LARGEST_MIXED_BLOCK_ROWS = 256


class Origin(NamedTuple):
    """Where a document comes from."""

    source: str
    shard: str
    row: int


class Corpus:
    """Documents in canonical order: sources by name, shards by path, rows as they stand. Open it with `open_corpus`."""

    def __init__(self, shards_by_source: dict[str, Sequence[Shard]], *, eval_fraction: float) -> None:
        self.source_names = sorted(shards_by_source)
        self._shards = [(name, shard) for name in self.source_names for shard in shards_by_source[name]]
        rows = np.array([sum(shard.runs) for _, shard in self._shards], dtype=np.int64)
        self._ends = np.cumsum(rows)
        self.num_documents = int(rows.sum())
        self.runs = [rows for _, shard in self._shards for rows in shard.runs]
        """Runs of documents that are cheap to read together, in order."""
        self._held_out_below = round(eval_fraction * 2**64)
        self.fingerprint = self._identity(eval_fraction)
        """Changes when a file's size, ends or rows, the column, or the split changes."""

    def text(self, document: int) -> str:
        """Give a document.

        Raises:
            DataError: names the file and the row.
        """
        return self.texts([document])[0]

    def texts(self, neighbours: Sequence[int]) -> list[str]:
        """Give documents of one run, as many of the first ones as are well read and kept together: one at least.

        Raises:
            DataError: names the file and the row.
        """
        number, first_row = self._locate(neighbours[0])
        shard = self._shards[number][1]
        rows = [first_row + document - neighbours[0] for document in neighbours[: shard.rows_at_once]]
        return shard.read(rows)

    def origin(self, document: int) -> Origin:
        """Tell where a document comes from."""
        shard, row = self._locate(document)
        name, opened = self._shards[shard]
        return Origin(name, opened.name, row)

    def is_held_out(self, text: str) -> bool:
        """Decide by a hash of the text, so that equal documents fall on one side."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"hfdist-eval").digest()
        return int.from_bytes(digest, "little") < self._held_out_below

    def mixed(self) -> Iterator[str]:
        """Give all documents once, in a fixed mixed order that no seed and no number of lanes changes.

        Blocks are mixed, since some files give neighbouring rows for the price of one. Small corpora: blocks of one.
        """
        most_rows = min(max(self.num_documents // _MIXED_BLOCKS, 1), _LARGEST_MIXED_BLOCK_ROWS)
        sizes = np.array(cut_runs(self.runs, most_rows), dtype=np.int64)
        firsts = np.cumsum(sizes) - sizes
        order = Permutation(len(sizes), "mixed")
        for index in range(len(sizes)):
            block = order.at(index)
            documents = range(int(firsts[block]), int(firsts[block] + sizes[block]))
            while documents:
                texts = self.texts(documents)
                yield from texts
                documents = documents[len(texts) :]

    def training_texts(self, max_bytes: int) -> Iterator[str]:
        """Give training documents in mixed order, until they are `max_bytes` together."""
        read_bytes = 0
        for text in self.mixed():
            if read_bytes >= max_bytes:
                return
            if not self.is_held_out(text):
                read_bytes += len(text.encode("utf-8", "replace"))
                yield text

    def _locate(self, document: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, document, side="right"))
        start = int(self._ends[shard - 1]) if shard else 0
        return shard, document - start

    def _identity(self, eval_fraction: float) -> str:
        shards = [[name, shard.name, sum(shard.runs), shard.identity] for name, shard in self._shards]
        return hashlib.blake2b(json.dumps([shards, eval_fraction]).encode(), digest_size=12).hexdigest()


def open_corpus(config: DataConfig) -> Corpus:
    """Open all sources and check them.

    Raises:
        ConfigError: a source that does not exist.
        DataError: a damaged file, no documents, or fewer than lanes.
    """
    folder = cache_dir(config)
    corpus = Corpus(
        {name: find_shards(name, source, folder) for name, source in config.sources.items()},
        eval_fraction=config.eval_fraction,
    )
    if corpus.num_documents < config.lanes:
        raise DataError(
            "there are fewer documents than lanes",
            where=", ".join(f"data.sources.{name}" for name in corpus.source_names),
            found=f"{corpus.num_documents} documents, {config.lanes} lanes",
            allowed="a document or more for each lane",
            hint="data.lanes=1 (then one data rank) or more data",
        )
    return corpus


def cache_dir(config: DataConfig) -> Path:
    """Folder for what is computed once: `data.cache_dir`, $HFDIST_CACHE, or ~/.cache/hfdist."""
    named = config.cache_dir or os.environ.get("HFDIST_CACHE") or Path.home() / ".cache" / "hfdist"
    return Path(named).expanduser()
