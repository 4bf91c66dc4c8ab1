"""Rows of shards as tokens, in order, made ahead by worker processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hfdist.config.data import BadRows
from hfdist.data.sources.base import BadRow, Shard
from hfdist.data.stream.workers import Vitals, keep_arrays
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.tokenize import text_digest
from hfdist.errors import DataError, HfdistError

logger = logging.getLogger(__name__)

# What a worker reads together: some kinds of files are decoded from the beginning of a run for each chunk of it.
_PORTION_ROWS = 64
_PORTION_READS = 8
_ENCODED_ROWS = 32
_PORTIONS_AHEAD = 4
_SHOWN_BAD_ROWS = 10
_NOTHING = np.empty(0, dtype=np.int32)

DocumentBatch = tuple[Shard, range]
"""Rows of one run of a shard."""


class Made(NamedTuple):
    """Some rows as tokens."""

    tokens: NDArray[Any]
    """All documents end to end."""
    lengths: list[int]
    digests: list[int]
    bad: dict[int, DataError]
    """By place among the rows."""


def cut_chunks(shards: Sequence[Shard]) -> list[DocumentBatch]:
    """Cut all rows of some shards, in order, into chunks."""
    chunks: list[DocumentBatch] = []
    for shard in shards:
        most_rows = max(_PORTION_ROWS, _PORTION_READS * shard.rows_at_once)
        first = 0
        for num_rows in shard.runs:
            stop = first + num_rows
            chunks += [(shard, range(start, min(start + most_rows, stop))) for start in range(first, stop, most_rows)]
            first = stop
    return chunks


def make_tokens(
    chunks: Sequence[DocumentBatch],
    encoders: Encoders,
    dtype: str,
    *,
    workers: int,
    on_bad_rows: BadRows,
) -> Iterator[Made]:
    """Give chunks as tokens, in order.

    Args:
        chunks: see `cut_chunks`.
        encoders: of the tokenizer.
        dtype: of the tokens: uint16, or uint32, which complements need.
        workers: processes that read and tokenize; 0: this one.
        on_bad_rows: `error` stops; else such rows become empty documents.

    Raises:
        DataError: a shard cannot be read, or a row, where `on_bad_rows` is to stop.
        ResourceError: a worker has died.
    """
    vitals = Vitals(workers, lambda _: "which tokenizes")
    loader = DataLoader(
        _Portions(chunks, encoders, dtype, vitals),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_PORTIONS_AHEAD if workers else None,
        collate_fn=keep_arrays,
        worker_init_fn=_keep_to_one_thread,
        multiprocessing_context="fork" if workers else None,
    )
    made, num_bad = iter(loader), 0
    try:
        with vitals.explain_deaths():
            for _ in chunks:
                chunk = next(made)
                if isinstance(chunk, HfdistError):
                    raise chunk
                for error in chunk.bad.values():
                    if on_bad_rows is BadRows.error:
                        error.hint = error.hint or "data.on_bad_rows=skip makes such rows empty documents"
                        raise error
                    num_bad += 1
                    if num_bad <= _SHOWN_BAD_ROWS:
                        logger.warning("%s: %s, so it becomes an empty document", error.where, error.what)
                yield chunk
    finally:
        # Ends the workers now. An error would hold it until the garbage is collected, and they would take five seconds.
        del made


def _keep_to_one_thread(worker: int) -> None:
    # The workers are the parallelism, and threads of the tokenizer do not outlive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class _Portions(Dataset[Any]):
    """Portions, each tokenized in the process that asks for it. Errors are values: torch would wrap them."""

    def __init__(self, chunks: Sequence[DocumentBatch], encoders: Encoders, dtype: str, vitals: Vitals) -> None:
        self._chunks, self._encoders, self._vitals = chunks, encoders, vitals
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> Made | HfdistError:
        shard, rows = self._chunks[index]
        if (info := get_worker_info()) is not None:
            self._vitals.note(info.id)
        try:
            found, digests = shard.read(rows), list[int]()
            made: list[NDArray[np.int32] | BadRow] = []
            for start in range(0, len(found), _ENCODED_ROWS):
                texts = found[start : start + _ENCODED_ROWS]
                digests += [text_digest("" if isinstance(text, BadRow) else text) for text in texts]
                made += self._encode(shard, rows[start : start + _ENCODED_ROWS], texts)
        except HfdistError as error:
            return error
        bad = {place: row.error for place, row in enumerate(made) if isinstance(row, BadRow)}
        documents = [_NOTHING if isinstance(row, BadRow) else row for row in made]
        lengths = [len(tokens) for tokens in documents]
        return Made(np.concatenate(documents).astype(self._dtype), lengths, digests, bad)

    def _encode(self, shard: Shard, rows: range, texts: Sequence[str | BadRow]) -> Iterator[NDArray[np.int32] | BadRow]:
        good = {row: text for row, text in zip(rows, texts, strict=True) if isinstance(text, str)}
        made = iter(self._encoders.encode(shard, list(good), list(good.values())))
        return (text if isinstance(text, BadRow) else next(made) for text in texts)
