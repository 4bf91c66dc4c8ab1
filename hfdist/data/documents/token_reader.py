"""Documents read as tokens: from token files or from the cache, or tokenized now; and what becomes of each."""

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

_BATCH_ROWS = 32
_BATCH_CHARACTERS = 1 << 20
"""Rows and characters that are tokenized together: enough to be fast, and so few that the first batch comes soon."""
_NOTHING = np.empty(0, dtype=np.int32)


class _Columns(NamedTuple):
    """Documents of one shard or of several as columns, before it is decided what becomes of them.

    Document k is the `lengths[k]` tokens from `starts[k]` of `tokens[arrays[k]]`.
    """

    tokens: Sequence[NDArray[np.integer]]
    """Tokens end to end; uint16, or int32 with complements, which are no targets."""
    arrays: NDArray[np.int64]
    """Number of the array in `tokens` that holds each document; shape [documents], as of all fields below."""
    starts: NDArray[np.int64]
    """Place in that array of the first token of each document."""
    lengths: NDArray[np.int64]
    """Number of tokens of each document."""
    digests: NDArray[np.uint64]
    """Hash of the text of each document, which decides whether it is held out."""


class Documents:
    """The reader of a corpus's documents as tokens, in any order.

    The tokens of training documents are given, or with `held_out` those of held-out documents; each document has its
    fate (`Status`).
    """

    def __init__(
        self, corpus: Corpus, encoders: Encoders, cache: TokenCache, config: DataConfig, *, held_out: bool = False
    ) -> None:
        self.corpus = corpus
        self._encoders, self._cache = encoders, cache
        self._config = config
        self._wants_held_out = held_out
        self._quarantined = np.array(sorted(corpus.quarantined), dtype=np.int64)

    def chunks(self, neighbours: NDArray[np.int64]) -> Iterator[DocumentBatch]:
        """Give neighbouring documents of one run, in chunks that are cheap to make together.

        `neighbours` are the canonical numbers of the documents; their order is kept.

        DataError: a row is bad and `data.on_bad_rows` is `error`, or a file has changed.
        """
        shard, first_document = self.corpus.shard_of(int(neighbours[0]))
        for start in range(0, len(neighbours), shard.rows_at_once):
            together = neighbours[start : start + shard.rows_at_once]
            if holds_tokens(shard):
                yield self.tokens_at_once(together)
                continue
            start_of_chunk = 0
            for rows in self._tokenized(shard, (together - first_document).tolist()):
                errors = {place: row.error for place, row in enumerate(rows) if isinstance(row, BadRow)}
                examples = np.arange(len(rows) if shard.gives_examples else 0)
                stop_of_chunk = start_of_chunk + len(rows)
                yield self._judge(together[start_of_chunk:stop_of_chunk], _join(rows), errors, examples)
                start_of_chunk = stop_of_chunk

    def tokens_at_once(self, numbers: NDArray[np.int64]) -> DocumentBatch:
        """Give any documents of any token files in one chunk; only their places are read, and no token.

        Each shard gives its documents together, and the columns are put back into the order asked for:

            owners   2 0 2 0    shard of each document
            places   1 3 0 2    documents by their shards; groups are (1 3) and (0 2)
            order    2 0 3 1    where each document stands in `places`
        """
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
        joined = _Columns(
            tokens=[of_shard.tokens for of_shard in columns],
            arrays=arrays,
            starts=np.concatenate([of_shard.starts for of_shard in columns])[order],
            lengths=np.concatenate([of_shard.lengths for of_shard in columns])[order],
            digests=np.concatenate([of_shard.digests for of_shard in columns])[order],
        )
        with_examples = [number for number, (shard, _) in enumerate(shards) if shard.gives_examples]
        examples = np.flatnonzero(np.isin(arrays, with_examples)) if with_examples else places[:0]
        return self._judge(numbers, joined, {}, examples)

    def _judge(
        self,
        numbers: NDArray[np.int64],
        columns: _Columns,
        errors: Mapping[int, DataError],
        examples: NDArray[np.int64],
    ) -> DocumentBatch:
        """Decide what becomes of each document; if several reasons exclude one, the last reason in this code counts.

        `errors` says why documents are bad, by their places in `numbers`. `examples` are the places of documents of
        which only some tokens are targets.
        """
        self._stop_at_bad(numbers, errors)
        longest, too_long = self._config.longest_row, self._config.too_long
        starts, lengths = columns.starts, columns.lengths
        if too_long is not TooLong.split:
            lengths = np.minimum(lengths, longest)
        if too_long is TooLong.truncate_start:
            starts = starts + columns.lengths - lengths
        fates = np.full(len(numbers), Status.trained, dtype=np.int64)
        if len(self._quarantined):
            fates[np.isin(numbers, self._quarantined)] = Status.quarantined
        if len(examples):
            fates[examples[~_have_target(columns, examples, starts, lengths)]] = Status.no_target
        if too_long is TooLong.drop:
            fates[columns.lengths > longest] = Status.too_long
        if self._encoders.images is not None:
            fates[_with_cut_images(columns, longest)] = Status.too_long
        is_elsewhere = self.corpus.are_held_out(columns.digests) != self._wants_held_out
        fates[is_elsewhere] = Status.held_out
        # Documents of the other side are not tokenized for a held-out set, and so have no length.
        fates[(columns.lengths == 0) & ~(is_elsewhere & self._wants_held_out)] = Status.empty
        fates[list(errors)] = Status.bad
        is_given = (fates == Status.trained) | (fates == Status.quarantined)
        lengths = np.where(is_given, lengths, 0)
        cut_tokens = np.where(is_given, columns.lengths - lengths, 0)
        return DocumentBatch(numbers, columns.tokens, columns.arrays, starts, lengths, cut_tokens, fates, errors)

    def _stop_at_bad(self, numbers: NDArray[np.int64], errors: Mapping[int, DataError]) -> None:
        """Raise the error of a bad document, unless bad rows are skipped or the document is quarantined."""
        if self._config.on_bad_rows is not BadRows.error:
            return
        for place, error in errors.items():
            document = int(numbers[place])
            if document not in self.corpus.quarantined:
                shard, _ = self.corpus.shard_of(document)
                is_alone = len(self.corpus.shards) == 1
                raise with_way_out(error, shard, str(self.corpus.origin(document)), is_alone=is_alone)

    def _tokenized(self, shard: Shard, rows: Sequence[int]) -> Iterator[Sequence[TokenRow | BadRow]]:
        """Give rows of one run as tokens, in their order, some at a time; new tokens are kept in the cache."""
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
            # All rows up to the first one that is neither known nor new are ready.
            stop = start
            ready: list[TokenRow | BadRow] = []
            while stop < len(rows) and (rows[stop] in known or rows[stop] in new):
                ready.append(known.get(rows[stop]) or new[rows[stop]])
                stop += 1
            start = stop
            yield ready

    def _tokenize(self, shard: Shard, texts: dict[int, str | BadRow]) -> dict[int, TokenRow | BadRow]:
        """Tokenize rows of a shard, by number; bad rows stay."""
        good = {row: text for row, text in texts.items() if isinstance(text, str)}
        many = self._encoders.encode(shard, list(good), list(good.values()))
        made: dict[int, TokenRow | BadRow] = {row: text for row, text in texts.items() if isinstance(text, BadRow)}
        for (row, text), tokens in zip(good.items(), many, strict=True):
            made[row] = tokens if isinstance(tokens, BadRow) else TokenRow(tokens, text_digest(text))
        return made

    def _passed_over(self, texts: dict[int, str | BadRow]) -> dict[int, TokenRow | BadRow]:
        """Give the rows of which a held-out set needs no tokens, as empty ones: they are training documents."""
        if not self._wants_held_out:
            return {}
        digests = {row: text_digest(text) for row, text in texts.items() if isinstance(text, str)}
        return {
            row: TokenRow(_NOTHING, digest) for row, digest in digests.items() if not self.corpus.is_held_out(digest)
        }


def _join(rows: Sequence[TokenRow | BadRow]) -> _Columns:
    """Join the tokens of rows end to end; bad rows are empty documents."""
    tokens = [_NOTHING if isinstance(row, BadRow) else row.tokens for row in rows]
    lengths = np.array([len(one) for one in tokens], dtype=np.int64)
    digests = np.array([0 if isinstance(row, BadRow) else row.text_digest for row in rows], dtype=np.uint64)
    starts = np.cumsum(lengths) - lengths
    return _Columns([np.concatenate(tokens)], np.zeros_like(starts), starts, lengths, digests)


def _have_target(
    columns: _Columns, places: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether each document at `places` has a target, shape [places]; `starts` and `lengths` are of its cut form.

    The first token of a document never is a target, since no token stands before it.
    """
    views = slices(columns.tokens, columns.arrays[places], starts[places], lengths[places])
    return np.array([bool(are_targets(tokens[1:]).any()) for tokens in views], dtype=bool)


def _with_cut_images(columns: _Columns, longest: int) -> list[int]:
    """Give the places of documents with images that are too long: a cut may leave an image without all its features."""
    places = np.flatnonzero(columns.lengths > longest)
    views = slices(columns.tokens, columns.arrays[places], columns.starts[places], columns.lengths[places])
    return [place for place, tokens in zip(places.tolist(), views, strict=True) if are_images(tokens).any()]


def _batches(shard: Shard, rows: Sequence[int]) -> Iterator[dict[int, str | BadRow]]:
    """Read rows of a shard together, and give their texts in batches to tokenize, by row."""
    batch: dict[int, str | BadRow] = {}
    num_characters = 0
    for row, read in zip(rows, shard.read(rows), strict=True):
        text = read
        if isinstance(read, str):
            text = split_columns(read)[0] if shard.gives_examples else read
            num_characters += len(text)
        batch[row] = text
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = {}, 0
    if batch:
        yield batch


def open_token_cache(config: DataConfig) -> TokenCache:
    """Open the token cache of this machine, whose name its file has: SQLite's locks do not work across machines."""
    return TokenCache(cache_dir(config) / f"tokens-{platform.node()}.sqlite", max_bytes=config.token_cache_bytes)
