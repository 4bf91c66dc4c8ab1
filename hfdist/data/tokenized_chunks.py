"""The tokenizing of shards in chunks, by worker processes or by this one; chunks come back in their order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import BadRows
from hfdist.data.sources.base import BadRow, Shard
from hfdist.data.stream.worker_deaths import WorkerRegistry
from hfdist.data.stream.worker_map import map_in_workers
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.text_encoder import text_digest
from hfdist.errors import DataError

logger = logging.getLogger(__name__)

_CHUNK_ROWS = 64
_CHUNK_READS = 8
"""Size of a chunk in rows, or in reads of `Shard.rows_at_once`: some files are decoded from their start for each."""
_ENCODED_ROWS = 32
"""Rows that are tokenized together."""
_CHUNKS_AHEAD = 4
"""Chunks that workers may be ahead."""
_SHOWN_BAD_ROWS = 10
_NOTHING = np.empty(0, dtype=np.int32)

Chunk = tuple[Shard, range]
"""A shard, and rows of one run of it."""


class TokenizedChunk(NamedTuple):
    """A chunk of rows as tokens."""

    tokens: NDArray[np.integer]
    """Tokens of all rows end to end, in the type of the token files."""
    lengths: list[int]
    """Number of tokens of each row."""
    digests: list[int]
    """Hash of each row's text, which decides whether it is held out."""
    bad: dict[int, DataError]
    """Errors of the rows that cannot be read, by their place in the chunk."""


def split_into_chunks(shards: Sequence[Shard]) -> list[Chunk]:
    """Split all rows of some shards, in order, into chunks of one run each."""
    chunks: list[Chunk] = []
    for shard in shards:
        most_rows = max(_CHUNK_ROWS, _CHUNK_READS * shard.rows_at_once)
        first = 0
        for num_rows in shard.runs:
            stop = first + num_rows
            chunks += [(shard, range(start, min(start + most_rows, stop))) for start in range(first, stop, most_rows)]
            first = stop
    return chunks


def tokenize_chunks(
    chunks: Sequence[Chunk], encoders: Encoders, dtype: str, workers: int, on_bad_rows: BadRows
) -> Iterator[TokenizedChunk]:
    """Tokenize chunks in `workers` processes, and give them in order; the error of a bad row is raised, or logged."""
    tokenize = _TokenizeChunk(chunks, encoders, dtype)
    registry = WorkerRegistry(workers, lambda _: "which tokenizes")
    num_bad = 0
    for chunk in map_in_workers(tokenize, len(chunks), registry, ahead=_CHUNKS_AHEAD):
        for error in chunk.bad.values():
            if on_bad_rows is BadRows.error:
                error.hint = error.hint or "data.on_bad_rows=skip makes such rows empty documents"
                raise error
            num_bad += 1
            if num_bad <= _SHOWN_BAD_ROWS:
                logger.warning("%s: %s, so it becomes an empty document", error.where, error.what)
        yield chunk


class _TokenizeChunk:
    """The function that workers call: it tokenizes the chunk of a number."""

    def __init__(self, chunks: Sequence[Chunk], encoders: Encoders, dtype: str) -> None:
        self._chunks, self._encoders = chunks, encoders
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __call__(self, number: int) -> TokenizedChunk:
        shard, rows = self._chunks[number]
        rows_read = iter(shard.read(rows))
        digests = list[int]()
        made: list[NDArray[np.int32] | BadRow] = []
        for start in range(0, len(rows), _ENCODED_ROWS):
            texts = list(islice(rows_read, _ENCODED_ROWS))
            digests += [text_digest("" if isinstance(text, BadRow) else text) for text in texts]
            made += self._encode(shard, rows[start : start + _ENCODED_ROWS], texts)
        bad = {place: row.error for place, row in enumerate(made) if isinstance(row, BadRow)}
        documents = [_NOTHING if isinstance(row, BadRow) else row for row in made]
        lengths = [len(tokens) for tokens in documents]
        return TokenizedChunk(np.concatenate(documents).astype(self._dtype), lengths, digests, bad)

    def _encode(self, shard: Shard, rows: range, texts: Sequence[str | BadRow]) -> Iterator[NDArray[np.int32] | BadRow]:
        """Tokenize the texts of some rows of a shard; bad rows stay."""
        good = {row: text for row, text in zip(rows, texts, strict=True) if isinstance(text, str)}
        made = iter(self._encoders.encode(shard, list(good), list(good.values())))
        return (text if isinstance(text, BadRow) else next(made) for text in texts)
