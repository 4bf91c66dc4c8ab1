"""How many steps some passes over the data take: counted by packing them once, and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import time

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig
from hfdist.data.corpus import Corpus, cache_dir
from hfdist.data.files import write_atomically
from hfdist.data.packing.sequence import IGNORED
from hfdist.data.stream import TokenStream
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
    key = hashlib.blake2b(json.dumps([2, *settings, sorted(corpus.quarantined)]).encode(), digest_size=12).hexdigest()
    path = cache_dir(config) / "steps" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # All processes of a machine come here at once: the first counts, the others wait and read.
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            logger.info("counting the steps, once: all data are tokenized and packed")
            counted = json.dumps(_count(stream, global_batch_size, at_most)).encode()
            write_atomically(path, lambda file: file.writelines([counted]))
        num_steps = int(json.loads(path.read_bytes()))
    if num_steps == 0:
        raise DataError(
            "there is nothing to learn from",
            where=", ".join(f"data.sources.{name}" for name in corpus.source_names),
            found=f"{corpus.num_documents:,} documents, none with a target",
        )
    return num_steps


def _count(stream: TokenStream, global_batch_size: int, at_most: int | None) -> int:
    num_steps, said = 0, time.monotonic()
    batches = iter(stream.loader(micro_batch_size=global_batch_size))
    while not stream.has_ended and num_steps != at_most:
        num_steps += bool((next(batches)["labels"] != IGNORED).any())
        if time.monotonic() - said > _SAY_EVERY_SECONDS:
            said = time.monotonic()
            logger.info("counted %d steps so far", num_steps)
    batches.close()
    return num_steps
