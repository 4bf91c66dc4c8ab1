"""Figures of a stream: the steps in some epochs, what a run has read of each pool, and what was cut or left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
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
_LOST_DOCUMENTS = {
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
    """Count the global batches that have a target, up to the end of a stream whose sources all have a limit of epochs.

    All data are packed once, and the count is cached; the cache also keeps the tokens, for the run itself.

    Args:
        corpus: the documents.
        tokenizer: must have an end-of-text token.
        config: `data.*`.
        global_batch_size: sequences in a global batch.
        at_most: the number at which counting stops; None: count all.
        images: what images of rows become; None: rows have none.

    Raises:
        DataError: no batch has a target.
    """
    stream = TokenStream(corpus, tokenizer, config, global_batch_size=global_batch_size).read_images(images)
    # The epochs, which end the stream, are not in its identity.
    epochs = [pool.epochs for pool in corpus.pools]
    settings = [stream.identity, epochs, corpus.local_fingerprint, global_batch_size, at_most]
    # The 2 is the version of the count: raise it when the same settings give another number of steps.
    path = cache_dir(config) / "steps" / f"{digest_of([2, *settings, sorted(corpus.quarantined)])}.json"
    write_once(path, lambda file: file.writelines([str(_count(stream, global_batch_size, at_most)).encode()]))
    num_steps = int(path.read_bytes())
    if num_steps == 0:
        where = ", ".join(f"data.sources.{name}" for name in corpus.source_names)
        roles, hint = explain_no_targets(corpus, config)
        found = f"{corpus.num_documents:,} documents, none with a target"
        if roles:
            found += f"; {roles}"
        raise DataError("there is nothing to learn from", where=where, found=found, hint=hint)
    return num_steps


def _count(stream: TokenStream, global_batch_size: int, at_most: int | None) -> int:
    """Read the stream to its end or to `at_most` steps, and count the global batches with a target."""
    logger.info("counting the steps, once: all data are tokenized and packed")
    num_steps, logged = 0, time.monotonic()
    stream.decodes = False
    batches = iter(stream.loader(batch_size=global_batch_size))
    while not stream.has_ended and num_steps != at_most:
        if (next(batches)["labels"] != IGNORED).any():
            num_steps += 1
        if time.monotonic() - logged > _LOG_EVERY_SECONDS:
            logged = time.monotonic()
            logger.info("counted %d steps so far", num_steps)
    batches.close()
    return num_steps


class PoolReport(NamedTuple):
    """What a run has read of one pool of documents."""

    name: str
    """Name of the pool."""
    sequences: int
    """Sequences that the run has read of the pool."""
    share: float
    """Share of these in the sequences of all pools, 0 to 1."""
    tokens: int
    """Tokens in these sequences, without filling."""
    epochs: float
    """Documents begun or passed over, divided by those that are there; the audit counts the same."""
    num_documents: int
    """Number of documents in the pool."""
    filled: float
    """Share of the places in these sequences that held tokens and no filling, 0 to 1."""


def report(cursor: Cursor, plan: LanePlan) -> list[PoolReport]:
    """Sum up what a run has read of each pool, from the merged cursor of all its lanes."""
    states = cursor.lanes.values()
    num_sequences = sum(progress.sequences for state in states for progress in state.pools)
    reports = []
    for number, pool in enumerate(plan.pools):
        sequences = tokens = documents = 0
        for state in states:
            progress = state.pools[number]
            sequences += progress.sequences
            tokens += progress.tokens
            documents += progress.documents
        reports.append(
            PoolReport(
                name=pool.name,
                sequences=sequences,
                share=sequences / max(num_sequences, 1),
                tokens=tokens,
                epochs=documents / max(pool.num_documents, 1),
                num_documents=pool.num_documents,
                filled=tokens / max(sequences * plan.shape.length, 1),
            )
        )
    return reports


def count_trained(ledger: Iterable[Records]) -> int:
    """Count the documents in the records of all lanes that were trained on, wholly or in part; again in each epoch."""
    return sum(int(np.count_nonzero(_begins_trained(records))) for records in ledger)


def describe_losses(ledger: Iterable[Records], config: DataConfig) -> str | None:
    """Describe how many documents in the records of all lanes were cut or left out; None: none was.

    Documents of the held-out split do not count.
    """
    num_cut = 0
    counts = dict.fromkeys(_LOST_DOCUMENTS, 0)
    for records in ledger:
        for status in counts:
            counts[status] += int(np.count_nonzero(records["fate"] == status))
        is_long = records["of_tokens"] > config.longest_row
        num_cut += int(np.count_nonzero(_begins_trained(records) & is_long))
    described = []
    # A packed document that is split goes on in another sequence: nothing of it is lost.
    is_split = config.packing is not Packing.none and config.too_long is TooLong.split
    if num_cut and not is_split:
        described.append(f"{num_cut:,} cut to {config.sequence_length:,} tokens")
    described += [f"{count:,} {_LOST_DOCUMENTS[status]}" for status, count in counts.items() if count]
    return ", ".join(described) or None


def _begins_trained(records: Records) -> NDArray[np.bool_]:
    """Tell the records in which a document begins that is trained on; shape [pieces]."""
    return (records["fate"] == Status.trained) & (records["first_token"] == 0)
