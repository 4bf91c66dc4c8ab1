"""All documents of a run under one numbering: where each comes from, its text, and which are taken out."""

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
_LARGEST_MIXED_BLOCK_ROWS = 256
_FEW_HELD_OUT, _MOST_SEARCHED = 20, 10_000
"""Where a share is expected to hold fewer documents, of at most so many, one is looked for if need be."""


class Origin(NamedTuple):
    """Where a document comes from."""

    source: str
    shard: str
    row: int

    def __str__(self) -> str:
        """Write the origin as `data.quarantine` takes it."""
        return f"{self.source}:{self.shard}:{self.row}"


@dataclass(frozen=True)
class Pool:
    """Documents that are drawn from together: one source, or all of them where no weights are given."""

    name: str
    first_document: int
    sources: tuple[Shards, ...]
    epochs: int | None
    """Passes at the most."""

    @cached_property
    def runs(self) -> Runs:
        """Runs of all its shards."""
        return Runs.join([source.runs for source in self.sources])

    @cached_property
    def num_documents(self) -> int:
        """Number of its documents."""
        return int(self.runs.rows.sum())

    @property
    def holds_tokens(self) -> bool:
        """Whether all of it is in token files."""
        return all(source.holds_tokens for source in self.sources)


class Corpus:
    """Documents in canonical order: sources by name, shards by path, rows as they stand. Open it with `open_corpus`."""

    def __init__(self, shards_by_source: Mapping[str, Shards], config: DataConfig) -> None:
        self.sources = {name: shards_by_source[name] for name in sorted(shards_by_source)}
        """Shards of each source, in canonical order."""
        self.source_names = [*self.sources]
        self.shards = NamedShards(self.sources)
        """Each with the name of its source, in canonical order."""
        self._runs = Runs.join([source.runs for source in self.sources.values()])
        self._ends = np.cumsum(self._runs.rows_per_shard)
        self.num_documents = int(self._runs.rows.sum())
        self.pools = self._make_pools(config)
        self._eval_fraction = config.eval_fraction
        self.quarantined = self._find(config.quarantine)
        """Documents that `data.quarantine` names."""
        self.has_examples = any(source.gives_examples for source in self.sources.values())
        """Whether only some tokens of some documents are targets."""
        identities = (one for name, source in self.sources.items() for one in source.identities_as_json(name))
        self.fingerprint = digest_of_pieces(json_of_pieces("[[", identities, f"], {json.dumps(config.eval_fraction)}]"))
        """Changes when a file's size, ends or rows, the column, or the split changes."""
        self.inventory = Inventory(self.sources)
        """What the files hold."""
        self.local_fingerprint = digest_of(
            [self.fingerprint, *(source.local_digest for source in self.sources.values())]
        )
        """Digest for this machine's caches: it also changes with a file's time of change, or its version."""

    def text(self, document: int) -> str:
        """Give a document; DataError, with the file and the row, where it cannot be read."""
        shard, first_document = self.shard_of(document)
        (text,) = shard.read([document - first_document])
        if isinstance(text, BadRow):
            raise text.error
        return split_columns(text)[0] if shard.gives_examples else text

    def read(self, documents: Sequence[int]) -> Iterator[tuple[int, str | BadRow]]:
        """Read neighbours of one run of a shard, as many together as a lane may hold; each with its number."""
        shard, first_document = self.shard_of(documents[0])
        for start in range(0, len(documents), shard.rows_at_once):
            together = documents[start : start + shard.rows_at_once]
            yield from zip(together, shard.read([number - first_document for number in together]), strict=True)

    def columns(self, documents: Iterable[int]) -> dict[int, Mapping[str, object]]:
        """Give the columns of rows that their examples do not show (`data.keep_columns`), by document.

        Plain texts and token files have none. DataError: see `text`.
        """
        found: dict[int, Mapping[str, object]] = {}
        for (number, _), places in groupby(map(self._locate, sorted(set(documents))), key=self._run):
            (_, shard), first, rows = self.shards[number], self._first_of(number), [row for _, row in places]
            if not shard.gives_examples or holds_tokens(shard):
                found |= {first + row: {} for row in rows}
                continue
            for row, text in zip(rows, shard.read(rows), strict=True):
                if isinstance(text, BadRow):
                    raise text.error
                found[first + row] = json.loads(split_columns(text)[1] or "{}")
        return found

    def images(self, document: int) -> tuple[ImageFile, ...]:
        """Give the images of a row, not decoded; DataError: see `text`."""
        shard, first_document = self.shard_of(document)
        (text,) = shard.read([document - first_document])
        if isinstance(text, BadRow):
            raise text.error
        return text.files if isinstance(text, WithImages) else ()

    def _first_of(self, number: int) -> int:
        """Give the canonical number of a shard's first row."""
        return int(self._ends[number - 1]) if number else 0

    def _run(self, place: tuple[int, int]) -> tuple[int, int]:
        """Give the shard and the run of a row: those of one run are cheap to read together."""
        number, row = place
        return number, int(np.searchsorted(np.cumsum(self.shards[number][1].runs), row, side="right"))

    def shard_of(self, document: int) -> tuple[Shard, int]:
        """Give the shard of a document, and the canonical number of the shard's first row."""
        number, row = self._locate(document)
        return self.shards[number][1], document - row

    def shards_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the number of the shard of each document."""
        return np.searchsorted(self._ends, documents, side="right")

    def origin(self, document: int) -> Origin:
        """Tell where a document comes from."""
        number, row = self._locate(document)
        return Origin(*self.shards.name_of(number), row)

    def is_held_out(self, digest: int) -> bool:
        """Decide by `text_digest` of the text, so that equal documents fall on one side."""
        return digest < self._held_out_below

    def are_held_out(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Decide for many: see `is_held_out`."""
        if self._held_out_below > np.iinfo(np.uint64).max:
            return np.ones(len(digests), dtype=bool)
        return digests < np.uint64(self._held_out_below)

    def mixed_blocks(self) -> Iterator[range]:
        """Give all documents once, in runs of neighbours, in a fixed mixed order that no seed and no lanes change.

        Blocks are mixed, since some files give neighbouring rows for the price of one. Small corpora: blocks of one.
        """
        most_rows = min(max(self.num_documents // _MIXED_BLOCKS, 1), _LARGEST_MIXED_BLOCK_ROWS)
        sizes = self._runs.cut(most_rows).rows
        firsts = np.cumsum(sizes) - sizes
        for block in permutation(len(sizes), "mixed"):
            yield range(int(firsts[block]), int(firsts[block] + sizes[block]))

    def training_texts(self, max_bytes: int) -> Iterator[str]:
        """Give training documents in mixed order, up to `max_bytes`, without bad rows, which the stream reports."""
        read_bytes = 0
        for block in self.mixed_blocks():
            shard, _ = self.shard_of(block[0])
            is_json = shard.gives_examples and not holds_tokens(shard)
            for _, text in self.read(block):
                if read_bytes >= max_bytes:
                    return
                if isinstance(text, str) and is_json:
                    text = split_columns(text)[0]
                if isinstance(text, str) and not self.is_held_out(text_digest(text)):
                    written = texts_in(text) if is_json else text
                    read_bytes += len(written.encode("utf-8", "replace"))
                    yield written

    @property
    def searches_held_out(self) -> bool:
        """Whether so few documents are held out on average that one is searched for: some are, unless all are alike."""
        is_few = 0 < self._eval_fraction * self.num_documents < _FEW_HELD_OUT
        return is_few and self._eval_fraction != 1 and self.num_documents <= _MOST_SEARCHED

    @cached_property
    def _held_out_below(self) -> int:
        """What the digests of held-out documents lie below."""
        below = round(self._eval_fraction * 2**64)
        if not self.searches_held_out:
            return below
        found: set[int] = set()
        for digest in self._digests():
            if digest < below:
                return below
            found.add(digest)
        # One alone is trained on.
        return min(found) + 1 if len(found) > 1 else below

    def _digests(self) -> Iterator[int]:
        """Give the digest of each document that can be read, is not empty, and is not taken out."""
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

    def _locate(self, document: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, document, side="right"))
        return shard, document - self._first_of(shard)

    def _make_pools(self, config: DataConfig) -> list[Pool]:
        sources = config.sources
        if any(source.weight is None for source in sources.values()):
            (epochs,) = {source.epochs for source in sources.values()}
            return [Pool("all", 0, tuple(self.sources.values()), epochs)]
        pools, first_document = [], 0
        for name, shards in self.sources.items():
            pools.append(Pool(name, first_document, (shards,), sources[name].epochs))
            first_document += pools[-1].num_documents
        return pools

    def _find(self, entries: Sequence[str]) -> frozenset[int]:
        found = set()
        for entry in entries:
            source, _, rest = entry.partition(":")
            name, _, row = rest.rpartition(":")
            number = self._number_of(source, name)
            num_rows = 0 if number is None else int(self._ends[number]) - self._first_of(number)
            if number is None or int(row) >= num_rows:
                allowed = "SOURCE:FILE:ROW, as messages and hfdist audit name it; rows are counted from 0"
                raise ConfigError("there is no such row", where="data.quarantine", found=entry, allowed=allowed)
            found.add(int(self._ends[number]) - num_rows + int(row))
        return frozenset(found)

    def _number_of(self, source: str, name: str) -> int | None:
        """Give the number of a shard; None: there is none."""
        before = 0
        for one, shards in self.sources.items():
            if one == source:
                number = shards.number_of(name)
                return None if number is None else before + number
            before += len(shards)
        return None


def open_corpus(
    config: DataConfig,
    given: Mapping[str, datasets.Dataset] | None = None,
    *,
    section: str = "data.sources",
    reads_all: bool = False,
) -> Corpus:
    """Open all sources and check them.

    Args:
        config: `data.*`.
        given: datasets in memory, by name; a source of that name in `config` gives column, weight and epochs.
        section: where the sources stand in the config, to name in messages.
        reads_all: whether JSON lines of any size are read for their rows, as who reads all of them anyway wants.

    Raises:
        ConfigError: a source that does not exist, or weights that do not go together.
        DataError: a damaged file, no documents, or fewer than lanes.
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
            # A file that is no table of rows has few of them.
            bad = find_rows_in_text(pool.sources[0][0]) or find_all_bad(pool.sources[0][0])
            if config.on_bad_rows is BadRows.error and bad is not None:
                raise bad
            names = corpus.source_names if len(corpus.pools) == 1 else [pool.name]
            # Lanes that all processes can share, whatever their layout.
            num_processes = read_launcher().world_size
            lanes = min(pool.num_documents for pool in corpus.pools) // num_processes * num_processes
            raise DataError(
                "there are fewer documents than lanes, the positions from which a stream is read",
                where=", ".join(f"{section}.{name}" for name in names),
                found=f"{pool.num_documents} documents, {config.lanes} lanes",
                allowed="a document or more for each lane",
                hint=f"data.lanes={lanes}, or more data" if lanes else "more data, or fewer processes",
            )
    return corpus
