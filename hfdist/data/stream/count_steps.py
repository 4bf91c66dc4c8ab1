"""How many steps some passes over the data take: counted by packing them once, and cached."""

from __future__ import annotations

import logging
import time

from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig
from hfdist.data.cache.files import digest_of, write_once
from hfdist.data.documents.corpus import Corpus, cache_dir
from hfdist.data.packing.sequence import IGNORED
from hfdist.data.stream.token_stream import TokenStream
from hfdist.errors import DataError

logger = logging.getLogger(__name__)

_SAY_EVERY_SECONDS = 30.0


def count_steps(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    global_batch_size: int,
    at_most: int | None,
) -> int:
    """Count the global batches with a target, up to the end of a stream whose sources all have a limit of epochs.

    The tokens that this makes are kept in the cache, for the run itself.

    Args:
        corpus: the documents.
        tokenizer: of the run.
        config: `data.*`.
        global_batch_size: sequences in one step.
        at_most: where to stop counting; None: nowhere.

    Raises:
        DataError: there is no batch with a target.
    """
    stream = TokenStream(corpus, tokenizer, config, global_batch_size=global_batch_size)
    # The stream's identity does not know the epochs, which end it.
    epochs = [pool.epochs for pool in corpus.pools]
    settings = [stream.identity, epochs, corpus.local_fingerprint, global_batch_size, at_most]
    path = cache_dir(config) / "steps" / f"{digest_of([2, *settings, sorted(corpus.quarantined)])}.json"
    write_once(path, lambda file: file.writelines([str(_count(stream, global_batch_size, at_most)).encode()]))
    num_steps = int(path.read_bytes())
    if num_steps == 0:
        raise DataError(
            "there is nothing to learn from",
            where=", ".join(f"data.sources.{name}" for name in corpus.source_names),
            found=f"{corpus.num_documents:,} documents, none with a target",
        )
    return num_steps


def _count(stream: TokenStream, global_batch_size: int, at_most: int | None) -> int:
    logger.info("counting the steps, once: all data are tokenized and packed")
    num_steps, said = 0, time.monotonic()
    batches = iter(stream.loader(batch_size=global_batch_size))
    while not stream.has_ended and num_steps != at_most:
        num_steps += bool((next(batches)["labels"] != IGNORED).any())
        if time.monotonic() - said > _SAY_EVERY_SECONDS:
            said = time.monotonic()
            logger.info("counted %d steps so far", num_steps)
    batches.close()
    return num_steps
