"""Documents as tokens: from token files, from the cache, or read and tokenized now."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import BadRows, DataConfig, TooLong, cache_dir
from hfdist.data.documents.bad_rows import with_way_out
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.token_cache import TokenCache, shard_key
from hfdist.data.marks import are_images, are_targets
from hfdist.data.order.records import Status
from hfdist.data.sources.base import BadRow, Shard, TokenRow, TokenShard, holds_tokens
from hfdist.data.sources.document_batch import DocumentBatch, slices
from hfdist.data.sources.formats import split_columns
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.text_encoder import text_digest
from hfdist.errors import DataError

logger = logging.getLogger(__name__)

# How much is tokenized together: enough to be fast, but so little that a first batch does not wait for a whole block.
_BATCH_ROWS = 32
_BATCH_CHARACTERS = 1 << 20
_NOTHING = np.empty(0, dtype=np.int32)


class _Columns(NamedTuple):
    """Documents of one shard or of several, before it is decided what happens to them; see `DocumentBatch`."""

    tokens: Sequence[NDArray[np.integer]]
    arrays: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    digests: NDArray[np.uint64]


class Documents:
    """Reads documents of a corpus in any order: the training documents, or with `held_out` the others."""

    def __init__(
        self, corpus: Corpus, encoders: Encoders, cache: TokenCache, config: DataConfig, *, held_out: bool = False
    ) -> None:
        self.corpus = corpus
        self._encoders, self._cache = encoders, cache
        self._config, self._wants_held_out = config, held_out
        self._quarantined = np.array(sorted(corpus.quarantined), dtype=np.int64)

    def chunks(self, neighbours: NDArray[np.int64]) -> Iterator[DocumentBatch]:
        """Give neighbouring documents of one shard in the order asked for, in chunks that are cheap to make together.

        DataError: a row is bad and `data.on_bad_rows` is `error`, or a file has changed.
        """
        shard, first_document = self.corpus.shard_of(int(neighbours[0]))
        for start in range(0, len(neighbours), shard.rows_at_once):
            together = neighbours[start : start + shard.rows_at_once]
            if holds_tokens(shard):
                yield self.tokens_at_once(together)
                continue
            first = 0
            for rows in self._tokenized(shard, (together - first_document).tolist()):
                bad = {place: row.error for place, row in enumerate(rows) if isinstance(row, BadRow)}
                examples = np.arange(len(rows) if shard.gives_examples else 0)
                yield self._judge(together[first : first + len(rows)], _join(rows), bad, examples)
                first += len(rows)

    def tokens_at_once(self, numbers: NDArray[np.int64]) -> DocumentBatch:
        """Give any documents of any token files in one chunk; this reads no token."""
        owners = self.corpus.shards_of(numbers)
        places = np.argsort(owners, kind="stable")
        groups = np.split(places, np.flatnonzero(np.diff(owners[places])) + 1)
        shards = [self.corpus.shard_of(int(numbers[group[0]])) for group in groups]
        columns = [
            cast(TokenShard, shard).token_columns(numbers[group] - first_document)
            for group, (shard, first_document) in zip(groups, shards, strict=True)
        ]
        order = np.empty_like(places)
        order[places] = np.arange(len(places))
        arrays = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[order]
        tokens, *others = zip(*columns, strict=True)
        starts, lengths, digests = (np.concatenate(one)[order] for one in others)
        with_examples = [number for number, (shard, _) in enumerate(shards) if shard.gives_examples]
        examples = np.flatnonzero(np.isin(arrays, with_examples)) if with_examples else places[:0]
        return self._judge(numbers, _Columns(tokens, arrays, starts, lengths, digests), {}, examples)

    def _judge(
        self,
        numbers: NDArray[np.int64],
        columns: _Columns,
        bad: Mapping[int, DataError],
        examples: NDArray[np.int64],
    ) -> DocumentBatch:
        """Decide what happens to each document; if several reasons exclude one, the last reason in this code counts.

        `bad` says why documents are bad, by their places in `numbers`; only some tokens of those at `examples` are
        targets.
        """
        length, too_long = self._config.longest_row, self._config.too_long
        if self._config.on_bad_rows is BadRows.error:
            for place, error in bad.items():
                if int(numbers[place]) not in self.corpus.quarantined:
                    shard, _ = self.corpus.shard_of(int(numbers[place]))
                    origin, is_alone = str(self.corpus.origin(int(numbers[place]))), len(self.corpus.shards) == 1
                    raise with_way_out(error, shard, origin, is_alone=is_alone)
        starts, lengths = columns.starts, columns.lengths
        if too_long is not TooLong.split:
            lengths = np.minimum(lengths, length)
        if too_long is TooLong.truncate_start:
            starts = starts + columns.lengths - lengths
        fates = np.full(len(numbers), Status.trained, dtype=np.int64)
        if len(self._quarantined):
            fates[np.isin(numbers, self._quarantined)] = Status.quarantined
        if len(examples):
            fates[examples[~_have_target(columns, examples, starts, lengths)]] = Status.no_target
        if too_long is TooLong.drop:
            fates[columns.lengths > length] = Status.too_long
        if self._encoders.images is not None:
            # A cut may leave an image without the places of its features.
            long = np.flatnonzero(columns.lengths > length)
            views = slices(columns.tokens, columns.arrays[long], columns.starts[long], columns.lengths[long])
            fates[[place for place, own in zip(long, views, strict=True) if are_images(own).any()]] = Status.too_long
        is_elsewhere = self.corpus.are_held_out(columns.digests) != self._wants_held_out
        fates[is_elsewhere] = Status.held_out
        # Documents of the other side are not tokenized for a held-out set, and so have no length.
        fates[(columns.lengths == 0) & ~(is_elsewhere & self._wants_held_out)] = Status.empty
        fates[list(bad)] = Status.bad
        is_given = (fates == Status.trained) | (fates == Status.quarantined)
        lengths = np.where(is_given, lengths, 0)
        cut_tokens = np.where(is_given, columns.lengths - lengths, 0)
        return DocumentBatch(numbers, columns.tokens, columns.arrays, starts, lengths, cut_tokens, fates, bad)

    def _tokenized(self, shard: Shard, rows: Sequence[int]) -> Iterator[Sequence[TokenRow | BadRow]]:
        key = shard_key(shard.local_identity, self._encoders.digest(examples=shard.gives_examples))
        known = self._cache.get(key, rows)
        if len(known) == len(rows):
            yield [known[row] for row in rows]
            return
        start = 0
        for texts in _batches(shard, [row for row in rows if row not in known]):
            passed_over = self._passed_over(texts)
            new = self._tokenize(shard, {row: text for row, text in texts.items() if row not in passed_over})
            self._cache.put(key, {row: made for row, made in new.items() if isinstance(made, TokenRow)})
            new |= passed_over
            # All rows up to the first one that is neither known nor new.
            stop = start
            ready: list[TokenRow | BadRow] = []
            while stop < len(rows) and (rows[stop] in known or rows[stop] in new):
                ready.append(known.get(rows[stop]) or new[rows[stop]])
                stop += 1
            start = stop
            yield ready

    def _tokenize(self, shard: Shard, texts: dict[int, str | BadRow]) -> dict[int, TokenRow | BadRow]:
        good = {row: text for row, text in texts.items() if isinstance(text, str)}
        many = self._encoders.encode(shard, list(good), list(good.values()))
        made: dict[int, TokenRow | BadRow] = {row: text for row, text in texts.items() if isinstance(text, BadRow)}
        for (row, text), tokens in zip(good.items(), many, strict=True):
            made[row] = tokens if isinstance(tokens, BadRow) else TokenRow(tokens, text_digest(text))
        return made

    def _passed_over(self, texts: dict[int, str | BadRow]) -> dict[int, TokenRow | BadRow]:
        """Find the rows that a held-out set passes over without tokens: training documents, which are most of them."""
        if not self._wants_held_out:
            return {}
        digests = {row: text_digest(text) for row, text in texts.items() if isinstance(text, str)}
        return {row: TokenRow(_NOTHING, one) for row, one in digests.items() if not self.corpus.is_held_out(one)}


def _join(rows: Sequence[TokenRow | BadRow]) -> _Columns:
    """Join rows end to end; bad rows are empty."""
    tokens = [_NOTHING if isinstance(row, BadRow) else row.tokens for row in rows]
    lengths = np.array([len(one) for one in tokens], dtype=np.int64)
    digests = np.array([0 if isinstance(row, BadRow) else row.text_digest for row in rows], dtype=np.uint64)
    starts = np.cumsum(lengths) - lengths
    return _Columns([np.concatenate(tokens)], np.zeros_like(starts), starts, lengths, digests)


def _have_target(
    columns: _Columns, places: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether any token of the documents at `places` is a target; the first never is: no token stands before it."""
    ends, tokens = starts + lengths, columns.tokens
    spans = zip(*(column[places].tolist() for column in (columns.arrays, starts, ends)), strict=True)
    return np.array(
        [bool(are_targets(tokens[array][start + 1 : stop]).any()) for array, start, stop in spans], dtype=bool
    )


def _batches(shard: Shard, rows: Sequence[int]) -> Iterator[dict[int, str | BadRow]]:
    """Read all texts together, and give them in batches to tokenize."""
    batch: dict[int, str | BadRow] = {}
    num_characters = 0
    for row, read in zip(rows, shard.read(rows), strict=True):
        text = split_columns(read)[0] if shard.gives_examples and isinstance(read, str) else read
        batch[row] = text
        num_characters += len(text) if isinstance(text, str) else 0
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = {}, 0
    if batch:
        yield batch


def open_token_cache(config: DataConfig) -> TokenCache:
    """Open this machine's token cache: the file has its name, because SQLite's locks do not work across machines."""
    return TokenCache(cache_dir(config) / f"tokens-{platform.node()}.sqlite", max_bytes=config.token_cache_bytes)
