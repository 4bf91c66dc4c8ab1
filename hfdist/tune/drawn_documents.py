"""A generator of random numbers for each document of a batch, so that each layout and resume draws the same for it.

a batch             its documents, and the seeds of their generators
row 0   a a a b b   a a a     (run's seed, number of document a, epoch, first token of the piece)
row 1   c c c c .   b b       (run's seed, number of document b, epoch, ...)
                    c c c c   ...
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hfdist.config.batch import IGNORED
from hfdist.data.packing.sequence import ORIGINS
from hfdist.strategies.engine import Batch

Ids = NDArray[np.int64]
"""Token ids; shape [tokens]."""


def drawn_documents(batch: Batch, seed: int) -> Iterator[tuple[Ids, np.random.Generator]]:
    """Give the token ids of each document, or piece of a document, of a batch, with its generator, in order.

    Documents without labels are left out: those in quarantine, and those that only fill up a row.

    Args:
        batch: `input_ids` and `labels` of shape [rows, tokens], with `ORIGINS`.
        seed: seed of the run.
    """
    ids, is_label = batch["input_ids"].numpy(), (batch["labels"] != IGNORED).numpy()
    for row_ids, row_is_label, pieces in zip(ids, is_label, batch[ORIGINS].tolist(), strict=True):
        start = 0
        for document, epoch, first_token, num_tokens in pieces:
            place = slice(start, start + num_tokens)
            if row_is_label[place].any():
                yield row_ids[place], np.random.default_rng([seed, document, epoch, first_token])
            start += num_tokens
