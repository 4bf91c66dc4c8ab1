"""Figures of a stream: steps of some epochs, what a run has read of each source, and what was cut or left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hfdist.config.batch import IGNORED
from hfdist.config.data import DataConfig, Packing, TooLong, cache_dir
from hfdist.data.cache import digest_of, write_once
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.first_examples import explain_no_targets
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.records import Records, Status
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.data.stream.token_stream import TokenStream
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import DataError

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 30.0
_LOSSES = {
    Status.too_long: "left out as too long",
    Status.no_target: "left out without a target",
    Status.bad: "left out as bad",
    Status.empty: "empty",
}


def count_steps(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    global_batch_size: int,
    at_most: int | None,
    images: ImageTokens | None = None,
) -> int:
    """Count the global batches with a target, up to the end of a stream whose sources all have a limit of epochs.

    All data are packed once, and the count is cached; the cache also keeps the tokens, for the run itself. Counting
    stops at `at_most`. DataError: there is no batch with a target.
    """
    stream = TokenStream(corpus, tokenizer, config, global_batch_size=global_batch_size).read_images(images)
    # The epochs, which end the stream, are not in its identity.
    epochs = [pool.epochs for pool in corpus.pools]
    settings = [stream.identity, epochs, corpus.local_fingerprint, global_batch_size, at_most]
    path = cache_dir(config) / "steps" / f"{digest_of([2, *settings, sorted(corpus.quarantined)])}.json"
    write_once(path, lambda file: file.writelines([str(_count(stream, global_batch_size, at_most)).encode()]))
    num_steps = int(path.read_bytes())
    if num_steps == 0:
        where = ", ".join(f"data.sources.{name}" for name in corpus.source_names)
        roles, hint = explain_no_targets(corpus, config)
        found = f"{corpus.num_documents:,} documents, none with a target{f'; {roles}' if roles else ''}"
        raise DataError("there is nothing to learn from", where=where, found=found, hint=hint)
    return num_steps


def _count(stream: TokenStream, global_batch_size: int, at_most: int | None) -> int:
    logger.info("counting the steps, once: all data are tokenized and packed")
    num_steps, logged = 0, time.monotonic()
    stream.decodes = False
    batches = iter(stream.loader(batch_size=global_batch_size))
    while not stream.has_ended and num_steps != at_most:
        num_steps += bool((next(batches)["labels"] != IGNORED).any())
        if time.monotonic() - logged > _LOG_EVERY_SECONDS:
            logged = time.monotonic()
            logger.info("counted %d steps so far", num_steps)
    batches.close()
    return num_steps


class PoolReport(NamedTuple):
    """What a run has read of one pool of documents."""

    name: str
    sequences: int
    share: float
    """Share of all sequences."""
    tokens: int
    epochs: float
    """Documents begun or passed over, divided by those that are there; the audit counts the same."""
    num_documents: int
    """Number of documents in the pool."""
    filled: float
    """Share of its sequences' places that held tokens."""


def report(cursor: Cursor, plan: LanePlan) -> list[PoolReport]:
    """Sum up a merged cursor, by pool."""
    num_sequences = sum(progress.sequences for state in cursor.lanes.values() for progress in state.pools)
    reports = []
    for number, pool in enumerate(plan.pools):
        counts = [state.pools[number][1:] for state in cursor.lanes.values()]
        sequences, tokens, documents = (sum(column) for column in zip(*counts, strict=True))
        epochs = documents / max(pool.num_documents, 1)
        share, filled = sequences / max(num_sequences, 1), tokens / max(sequences * plan.shape.length, 1)
        reports.append(PoolReport(pool.name, sequences, share, tokens, epochs, pool.num_documents, filled))
    return reports


def count_trained(ledger: Iterable[Records]) -> int:
    """Count the documents in the records of all lanes that were trained on, wholly or in part; again in each epoch."""
    begun = ((records["fate"] == Status.trained) & (records["first_token"] == 0) for records in ledger)
    return sum(int(one.sum()) for one in begun)


def describe_losses(ledger: Iterable[Records], config: DataConfig) -> str | None:
    """Describe how many documents in the records of all lanes were cut or left out; None: none.

    Documents of the held-out split do not count.
    """
    num_cut = 0
    counts = dict.fromkeys(_LOSSES, 0)
    for records in ledger:
        for status in _LOSSES:
            counts[status] += int((records["fate"] == status).sum())
        begins = (records["fate"] == Status.trained) & (records["first_token"] == 0)
        num_cut += int((begins & (records["of_tokens"] > config.longest_row)).sum())
    if config.packing is not Packing.none and config.too_long is TooLong.split:
        num_cut = 0
    described = {f"cut to {config.sequence_length:,} tokens": num_cut} | {_LOSSES[one]: n for one, n in counts.items()}
    return ", ".join(f"{count:,} {what}" for what, count in described.items() if count) or None
