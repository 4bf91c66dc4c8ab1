"""Documents as tokens: from token files, from the cache, or read and tokenized now."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import BadRows, DataConfig, TooLong
from hfdist.data.cache.tokens import TokenCache, shard_key
from hfdist.data.corpus import Corpus, cache_dir
from hfdist.data.encoders import Encoders
from hfdist.data.records import Fate
from hfdist.data.sources.base import BadRow, Shard, TokenRow, TokenShard
from hfdist.data.tokenize import text_digest
from hfdist.errors import DataError

logger = logging.getLogger(__name__)

# Tokenized together: enough to be quick, few enough that a first batch does not wait for a whole block.
_BATCH_ROWS = 32
_BATCH_CHARACTERS = 1 << 20
_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Document:
    """A document, and what is to become of it."""

    number: int
    tokens: NDArray[np.int32]
    """Empty unless the fate is `trained` or `quarantined`; complements (negative) are no targets. Shape [tokens]."""
    fate: Fate
    error: DataError | None = None
    """Why it is bad."""
    cut_tokens: int = 0
    """How many `data.too_long` has cut off."""


class Documents:
    """Reads documents of a corpus, in any order.

    Args:
        corpus: the documents.
        tokenizer: must have an end-of-text token.
        cache: of tokens.
        config: `data.*`.
        held_out: give the held-out documents, and pass over the others.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        cache: TokenCache,
        config: DataConfig,
        *,
        held_out: bool = False,
    ) -> None:
        self.corpus = corpus
        self._cache, self._config, self._wants_held_out = cache, config, held_out
        self._encoders = Encoders(tokenizer, config.chat)

    def read(self, neighbours: Sequence[int]) -> Iterator[list[Document]]:
        """Give documents of one run in the order asked for, in portions that are cheap to make together.

        Raises:
            DataError: a row is bad and `data.on_bad_rows` is `error`, or a file has changed.
        """
        shard, rows = self.corpus.locate(neighbours)
        numbers = iter(neighbours)
        for portion in self._rows(shard, rows):
            yield [self._judge(next(numbers), row, shard) for row in portion]

    def _judge(self, number: int, row: TokenRow | BadRow, shard: Shard) -> Document:
        if isinstance(row, BadRow):
            if self._config.on_bad_rows is BadRows.error and number not in self.corpus.quarantined:
                raise self._with_way_out(row.error, number)
            return Document(number, _NOTHING, Fate.bad, row.error)
        if len(row.tokens) == 0:
            return Document(number, _NOTHING, Fate.empty)
        if self.corpus.is_held_out(row.text_digest) != self._wants_held_out:
            return Document(number, _NOTHING, Fate.held_out)
        tokens = self._cut(row.tokens)
        if tokens is None:
            return Document(number, _NOTHING, Fate.too_long)
        # The first token is never a target: nothing stands before it.
        if shard.gives_examples and not (tokens[1:] >= 0).any():
            return Document(number, _NOTHING, Fate.no_target)
        fate = Fate.quarantined if number in self.corpus.quarantined else Fate.trained
        return Document(number, tokens, fate, cut_tokens=len(row.tokens) - len(tokens))

    def _cut(self, tokens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """What `data.too_long` leaves of a document; None: nothing."""
        length = self._config.sequence_length
        if len(tokens) <= length:
            return tokens
        match self._config.too_long:
            case TooLong.split:
                return tokens
            case TooLong.truncate_end:
                return tokens[:length]
            case TooLong.truncate_start:
                return tokens[-length:]
            case TooLong.drop:
                return None

    def _with_way_out(self, error: DataError, number: int) -> DataError:
        way_out = f"data.on_bad_rows=skip, or 'data.quarantine=[\"{self.corpus.origin(number)}\"]'"
        return DataError(
            error.what,
            where=error.where,
            found=error.found,
            allowed=error.allowed,
            hint=way_out if error.hint is None else f"{error.hint}, or {way_out}",
        )

    def _rows(self, shard: Shard, rows: Sequence[int]) -> Iterator[Sequence[TokenRow | BadRow]]:
        for start in range(0, len(rows), shard.rows_at_once):
            together = rows[start : start + shard.rows_at_once]
            if hasattr(shard, "read_tokens"):
                yield cast(TokenShard, shard).read_tokens(together)
            else:
                yield from self._tokenized(shard, together)

    def _tokenized(self, shard: Shard, rows: Sequence[int]) -> Iterator[Sequence[TokenRow | BadRow]]:
        key = shard_key(shard.local_identity, self._encoders.digest(examples=shard.gives_examples))
        known = self._cache.get(key, rows)
        if len(known) == len(rows):
            yield [known[row] for row in rows]
            return
        start = 0
        for texts in _batches(shard, [row for row in rows if row not in known]):
            new = self._tokenize(shard, texts)
            self._cache.put(key, {row: made for row, made in new.items() if isinstance(made, TokenRow)})
            # As far as the new ones reach, with the known ones between them.
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


def _batches(shard: Shard, rows: Sequence[int]) -> Iterator[dict[int, str | BadRow]]:
    """Texts, read together and in batches to tokenize."""
    batch: dict[int, str | BadRow] = {}
    num_characters = 0
    for row, text in zip(rows, shard.read(rows), strict=True):
        batch[row] = text
        num_characters += len(text) if isinstance(text, str) else 0
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = {}, 0
    if batch:
        yield batch


def open_token_cache(config: DataConfig) -> TokenCache:
    """Open the tokens that this machine keeps: by its name, as SQLite's locks do not reach to another machine."""
    return TokenCache(cache_dir(config) / f"tokens-{platform.node()}.sqlite", max_bytes=config.token_cache_bytes)
