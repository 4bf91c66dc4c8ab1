"""The ledger of a whole run, as the audit reads it: the records of all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.records import Records, Status
from hfdist.data.stream.ledger import read_records
from hfdist.errors import DataError


def read_ledger(folder: Path, lanes: int) -> list[Records]:
    """Open the records of all lanes.

    Raises:
        DataError: there are none.
    """
    records = [np.asarray(read_records(folder, lane)) for lane in range(lanes)]
    if not any(len(own) for own in records):
        raise DataError(
            "the run has no ledger",
            where=str(folder),
            allowed="lane-*.records, which are written with each checkpoint and at the end",
            hint="an audit once the run has saved or ended",
        )
    return records


def batches_of_steps(records: Sequence[Records], global_batch_size: int) -> tuple[int, NDArray[np.int64]]:
    """Which global batch each step took: the next with a target, since one without takes no step.

    Args:
        records: of all lanes.
        global_batch_size: sequences in a batch.

    Returns:
        First step of the ledger, and the batches from there on, both counted from 0; what a ledger that begins inside a
        run does not hold is taken to have been steps.
    """
    with_target = []
    for lane, own in enumerate(records):
        # The first token of each piece is no target.
        own = own[(own["fate"] == Status.trained) & (own["num_tokens"] > 1)]
        with_target.append(np.unique((own["sequence"] * len(records) + lane) // global_batch_size))
    return first_sample(records) // global_batch_size, np.unique(np.concatenate(with_target))


def first_sample(records: Sequence[Records]) -> int:
    """Number of the first sequence of a ledger in its run."""
    return min(int(own["sequence"][0]) * len(records) + lane for lane, own in enumerate(records) if len(own))


def end_sample(records: Sequence[Records]) -> int:
    """Number of the sequence behind the last one of a ledger."""
    return max(int(own["sequence"][-1]) * len(records) + lane for lane, own in enumerate(records) if len(own)) + 1
