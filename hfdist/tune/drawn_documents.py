"""The documents of a batch, each with a generator of its own: what it draws is the same in every layout and resume.

row 0   a a a b b           a a a   drawn by (seed, document a, epoch, first token)
row 1   c c c c .           b b
                            c c c c
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hfdist.config.batch import IGNORED
from hfdist.data.packing.sequence import ORIGINS
from hfdist.strategies.engine import Batch

Ids = NDArray[np.int64]


def drawn_documents(batch: Batch, seed: int) -> Iterator[tuple[Ids, np.random.Generator]]:
    """Give the token ids of each document of a batch, or of each piece of one, in order, and what draws for it.

    Not of those without labels: quarantined ones, and rows that only fill up.

    Args:
        batch: `input_ids` and `labels` of shape [rows, tokens], with `ORIGINS`.
        seed: of the run.
    """
    ids, has_labels = batch["input_ids"].numpy(), (batch["labels"] != IGNORED).numpy()
    for row, has_label, pieces in zip(ids, has_labels, batch[ORIGINS].tolist(), strict=True):
        start = 0
        for document, epoch, first_token, num_tokens in pieces:
            place = slice(start, start + num_tokens)
            if has_label[place].any():
                yield row[place], np.random.default_rng([seed, document, epoch, first_token])
            start += num_tokens
