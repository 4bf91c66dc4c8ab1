"""The corpus of a run: all its documents under one numbering, with the origin and the text of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import datasets
import numpy as np
from numpy.typing import NDArray

from hfdist.config.checks.data import check_mixture
from hfdist.config.data import BadRows, DataConfig, SourceConfig, cache_dir
from hfdist.data.cache import digest_of, digest_of_pieces
from hfdist.data.documents.bad_rows import find_all_bad, find_rows_in_text
from hfdist.data.documents.inventory import Inventory
from hfdist.data.order.runs import Runs
from hfdist.data.order.shuffle import permutation
from hfdist.data.sources.base import BadRow, Shard, holds_tokens
from hfdist.data.sources.dataset import DatasetShard
from hfdist.data.sources.find import find_shards
from hfdist.data.sources.formats import split_columns, texts_in
from hfdist.data.sources.images import ImageFile, WithImages
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.shards import NamedShards, OpenShards, Shards, json_of_pieces
from hfdist.data.tokenization.text_encoder import text_digest
from hfdist.errors import ConfigError, DataError
from hfdist.topology import read_launcher

_MIXED_BLOCKS = 1024
"""Blocks into which a corpus is cut at least, if it has as many documents, to mix it."""
_LARGEST_MIXED_BLOCK_ROWS = 256
_FEW_HELD_OUT = 20
"""Documents: where fewer are held out on average, none may be, and one is searched for."""
_MOST_SEARCHED = 10_000
"""Documents of the largest corpus that is searched."""


class Origin(NamedTuple):
    """The origin of a document: the number of its row in a shard of a source, counted from 0."""

    source: str
    shard: str
    row: int

    def __str__(self) -> str:
        """Write the origin as `data.quarantine` takes it."""
        return f"{self.source}:{self.shard}:{self.row}"


@dataclass(frozen=True)
class Pool:
    """Documents that are drawn together: those of one source, or of all sources where no weights are given."""

    name: str
    """Name of the source; "all" for all sources."""
    first_document: int
    """Canonical number of its first document; the others follow."""
    sources: tuple[Shards, ...]
    epochs: int | None
    """Passes at the most; None: any number."""

    @cached_property
    def runs(self) -> Runs:
        """Runs of all shards of the pool."""
        return Runs.join([source.runs for source in self.sources])

    @cached_property
    def num_documents(self) -> int:
        """Number of documents of the pool."""
        return int(self.runs.rows.sum())

    @property
    def holds_tokens(self) -> bool:
        """Whether all documents of the pool are in token files."""
        return all(source.holds_tokens for source in self.sources)


class _Located(NamedTuple):
    """A document by the canonical number of its shard, and the number of its row there."""

    shard: int
    row: int


class Corpus:
    """All documents in canonical order: sources by name, shards by path, rows as they stand; `open_corpus` makes it.

    source a                       source b
    shard 0       shard 1          shard 2
    0 1 2 3 4     5 6 7            8 9 10 11       canonical numbers of the documents
    """

    def __init__(self, shards_by_source: Mapping[str, Shards], config: DataConfig) -> None:
        self.sources = {name: shards_by_source[name] for name in sorted(shards_by_source)}
        """Shards of each source, in canonical order."""
        self.source_names = [*self.sources]
        self.shards = NamedShards(self.sources)
        """Shards of all sources in canonical order, each with the name of its source."""
        self._runs = Runs.join([source.runs for source in self.sources.values()])
        # The canonical number after the last row of each shard.
        self._ends = np.cumsum(self._runs.rows_per_shard)
        self.num_documents = int(self._runs.rows.sum())
        self.pools = self._make_pools(config)
        self._eval_fraction = config.eval_fraction
        self.quarantined = self._find_quarantined(config.quarantine)
        """Canonical numbers of the documents that `data.quarantine` names."""
        self.has_examples = any(source.gives_examples for source in self.sources.values())
        """Whether a source gives examples for fine-tuning, of which only some tokens are targets."""
        identities = (one for name, source in self.sources.items() for one in source.identities_as_json(name))
        self.fingerprint = digest_of_pieces(json_of_pieces("[[", identities, f"], {json.dumps(config.eval_fraction)}]"))
        """Digest of size, ends and rows of all files, of the columns that are read, and of the held-out share."""
        self.inventory = Inventory(self.sources)
        """Inventory of what the files hold."""
        self.local_fingerprint = digest_of(
            [self.fingerprint, *(source.local_digest for source in self.sources.values())]
        )
        """Digest for this machine's caches: `fingerprint`, and the versions or times of change of all files."""

    def text(self, document: int) -> str:
        """Give the text of a document, or its example as JSON; DataError: the row, which it names, cannot be read."""
        shard, first_document = self.shard_of(document)
        (text,) = shard.read([document - first_document])
        if isinstance(text, BadRow):
            raise text.error
        return split_columns(text)[0] if shard.gives_examples else text

    def read(self, documents: Sequence[int]) -> Iterator[tuple[int, str | BadRow]]:
        """Give the texts of neighbouring documents of one run, each with its number; few are in memory at a time."""
        shard, first_document = self.shard_of(documents[0])
        for start in range(0, len(documents), shard.rows_at_once):
            together = documents[start : start + shard.rows_at_once]
            yield from zip(together, shard.read([number - first_document for number in together]), strict=True)

    def columns(self, documents: Iterable[int]) -> dict[int, Mapping[str, object]]:
        """Give, by document, the columns that examples do not show, where `data.keep_columns` keeps them.

        Plain texts and token files have no such columns. DataError: a row cannot be read.
        """
        found: dict[int, Mapping[str, object]] = {}
        located = map(self._locate, sorted(set(documents)))
        # Rows of one run are read together.
        for (number, _), group in groupby(located, key=self._run_of):
            rows = [row for _, row in group]
            _, shard = self.shards[number]
            first = self._first_of(number)
            if not shard.gives_examples or holds_tokens(shard):
                found |= {first + row: {} for row in rows}
                continue
            for row, text in zip(rows, shard.read(rows), strict=True):
                if isinstance(text, BadRow):
                    raise text.error
                _, columns = split_columns(text)
                found[first + row] = json.loads(columns or "{}")
        return found

    def images(self, document: int) -> tuple[ImageFile, ...]:
        """Give the images of a document, which are not decoded; DataError: the row cannot be read."""
        shard, first_document = self.shard_of(document)
        (text,) = shard.read([document - first_document])
        if isinstance(text, BadRow):
            raise text.error
        return text.files if isinstance(text, WithImages) else ()

    def _first_of(self, number: int) -> int:
        """Give the canonical number of a shard's first row."""
        return int(self._ends[number - 1]) if number else 0

    def _run_of(self, place: _Located) -> tuple[int, int]:
        """Give the numbers of the shard and of the run in which a row stands."""
        _, shard = self.shards[place.shard]
        run = np.searchsorted(np.cumsum(shard.runs), place.row, side="right")
        return place.shard, int(run)

    def shard_of(self, document: int) -> tuple[Shard, int]:
        """Give the shard of a document, and the canonical number of the shard's first row."""
        number, row = self._locate(document)
        _, shard = self.shards[number]
        return shard, document - row

    def shards_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the canonical number of the shard of each document; shape [documents]."""
        return np.searchsorted(self._ends, documents, side="right")

    def origin(self, document: int) -> Origin:
        """Give the origin of a document."""
        number, row = self._locate(document)
        return Origin(*self.shards.name_of(number), row)

    def is_held_out(self, digest: int) -> bool:
        """Whether a document with this `text_digest` is held out: equal texts are on one side of the split."""
        return digest < self._held_out_below

    def are_held_out(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether documents with these digests are held out; shape [documents]."""
        # All are held out: the bound is 2**64, which is no uint64.
        if self._held_out_below > np.iinfo(np.uint64).max:
            return np.ones(len(digests), dtype=bool)
        return digests < np.uint64(self._held_out_below)

    def mixed_blocks(self) -> Iterator[range]:
        """Give all documents once, in blocks of neighbours, in a fixed mixed order that no seed and no lanes change.

        Blocks are mixed, and not documents, since some files give neighbouring rows for the price of one. The blocks
        of a small corpus have one document each.
        """
        most_rows = min(max(self.num_documents // _MIXED_BLOCKS, 1), _LARGEST_MIXED_BLOCK_ROWS)
        sizes = self._runs.cut(most_rows).rows
        firsts = np.cumsum(sizes) - sizes
        for block in permutation(len(sizes), "mixed"):
            yield range(int(firsts[block]), int(firsts[block] + sizes[block]))

    def training_texts(self, max_bytes: int) -> Iterator[str]:
        """Give texts of training documents in mixed order, up to `max_bytes` of UTF-8; bad rows are left out."""
        read_bytes = 0
        for block in self.mixed_blocks():
            shard, _ = self.shard_of(block[0])
            is_json = shard.gives_examples and not holds_tokens(shard)
            for _, text in self.read(block):
                if read_bytes >= max_bytes:
                    return
                if isinstance(text, BadRow):
                    continue
                document = split_columns(text)[0] if is_json else text
                if self.is_held_out(text_digest(document)):
                    continue
                written = texts_in(document) if is_json else document
                read_bytes += len(written.encode("utf-8", "replace"))
                yield written

    @property
    def searches_held_out(self) -> bool:
        """Whether so few documents are held out on average that one is searched for, so that one is in any case."""
        is_few = 0 < self._eval_fraction * self.num_documents < _FEW_HELD_OUT
        return is_few and self._eval_fraction != 1 and self.num_documents <= _MOST_SEARCHED

    @cached_property
    def _held_out_below(self) -> int:
        """Bound of the digests: documents with smaller ones are held out.

        Digests are spread evenly below 2**64. A small corpus may have none below its share of that. The smallest one is
        then held out.
        """
        below = round(self._eval_fraction * 2**64)
        if not self.searches_held_out:
            return below
        found: set[int] = set()
        for digest in self._digests():
            if digest < below:
                return below
            found.add(digest)
        # A text alone is trained on.
        return min(found) + 1 if len(found) > 1 else below

    def _digests(self) -> Iterator[int]:
        """Give the digest of each document that can be read, is not empty, and is not quarantined."""
        for number, (_, shard) in enumerate(self.shards):
            first = self._first_of(number)
            if holds_tokens(shard):
                kept = [row for row in range(sum(shard.runs)) if first + row not in self.quarantined]
                columns = shard.token_columns(np.array(kept, dtype=np.int64))
                yield from columns.digests[columns.lengths > 0].tolist()
                continue
            for num_rows in filter(None, shard.runs):
                for document, text in self.read(range(first, first + num_rows)):
                    if text and not isinstance(text, BadRow) and document not in self.quarantined:
                        yield text_digest(split_columns(text)[0] if shard.gives_examples else text)
                first += num_rows

    def _locate(self, document: int) -> _Located:
        shard = int(np.searchsorted(self._ends, document, side="right"))
        return _Located(shard, document - self._first_of(shard))

    def _make_pools(self, config: DataConfig) -> list[Pool]:
        """Make a pool of each source; of all together where one has no weight."""
        sources = config.sources
        if any(source.weight is None for source in sources.values()):
            (epochs,) = {source.epochs for source in sources.values()}
            return [Pool("all", 0, tuple(self.sources.values()), epochs)]
        pools, first_document = [], 0
        for name, shards in self.sources.items():
            pools.append(Pool(name, first_document, (shards,), sources[name].epochs))
            first_document += pools[-1].num_documents
        return pools

    def _find_quarantined(self, entries: Sequence[str]) -> frozenset[int]:
        """Give the documents of entries SOURCE:FILE:ROW; ConfigError: there is no such row."""
        found: set[int] = set()
        for entry in entries:
            source, _, rest = entry.partition(":")
            name, _, row = rest.rpartition(":")
            number = self._number_of(source, name)
            document = None if number is None else self._first_of(number) + int(row)
            if number is None or document is None or document >= int(self._ends[number]):
                allowed = "SOURCE:FILE:ROW, as messages and hfdist audit name it; rows are counted from 0"
                raise ConfigError("there is no such row", where="data.quarantine", found=entry, allowed=allowed)
            found.add(document)
        return frozenset(found)

    def _number_of(self, source: str, name: str) -> int | None:
        """Give the canonical number of a shard by its names; None: there is none."""
        first = 0
        for source_name, shards in self.sources.items():
            if source_name == source:
                number = shards.number_of(name)
                return None if number is None else first + number
            first += len(shards)
        return None


def open_corpus(
    config: DataConfig,
    given: Mapping[str, datasets.Dataset] | None = None,
    *,
    section: str = "data.sources",
    reads_all: bool = False,
) -> Corpus:
    """Open all sources of a run, and check them.

    Args:
        config: The config's section `data`.
        given: Datasets in memory by their names; a source of that name in `config` says column, weight and epochs.
        section: Key of the sources in the config, for messages.
        reads_all: Whether JSON lines of any size are read for their rows: the caller reads all of them anyway.

    Raises:
        ConfigError: A source does not exist, or weights do not go together.
        DataError: A file is damaged, or there are no documents, or fewer than lanes.
    """
    given = given or {}
    sources = {name: SourceConfig() for name in given} | config.sources
    config = replace(config, sources=sources)
    check_mixture(config)
    shards: dict[str, Shards] = {
        name: find_shards(name, config, cache_dir(config), section=section, reads_all=reads_all)
        for name in sources
        if name not in given
    }
    for name, dataset in given.items():
        rows = RowReader.of(sources[name], config, f"{section}.{name}")
        shards[name] = OpenShards([DatasetShard(name, dataset, rows, cache_dir(config))])
    corpus = Corpus(shards, config)
    for pool in corpus.pools:
        if pool.num_documents < config.lanes:
            raise _too_few_documents(corpus, pool, config, section)
    return corpus


def _too_few_documents(corpus: Corpus, pool: Pool, config: DataConfig, section: str) -> DataError:
    """Give the error of a pool that has fewer documents than there are lanes."""
    # A file that is no table of rows has few of them.
    first_shard = pool.sources[0][0]
    bad = find_rows_in_text(first_shard) or find_all_bad(first_shard)
    if config.on_bad_rows is BadRows.error and bad is not None:
        return bad
    names = corpus.source_names if len(corpus.pools) == 1 else [pool.name]
    # Lanes that all processes can share, whatever their layout.
    num_processes = read_launcher().world_size
    lanes = min(one.num_documents for one in corpus.pools) // num_processes * num_processes
    return DataError(
        "there are fewer documents than lanes, the positions from which a stream is read",
        where=", ".join(f"{section}.{name}" for name in names),
        found=f"{pool.num_documents} documents, {config.lanes} lanes",
        allowed="a document or more for each lane",
        hint=f"data.lanes={lanes}, or more data" if lanes else "more data, or fewer processes",
    )
