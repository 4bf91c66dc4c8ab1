"""The ledger of a whole run, as the audit reads it: the records of all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hfdist.data.ledger import read_records
from hfdist.data.records import Records
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
            allowed="lane-*.records, which are written with each checkpoint",
            hint="checkpoint.every=... (with checkpoint=none a run writes none)",
        )
    return records


def first_sample(records: Sequence[Records]) -> int:
    """Number of the first sequence of a ledger in its run."""
    return min(int(own["sequence"][0]) * len(records) + lane for lane, own in enumerate(records) if len(own))


def end_sample(records: Sequence[Records]) -> int:
    """Number of the sequence behind the last one of a ledger."""
    return max(int(own["sequence"][-1]) * len(records) + lane for lane, own in enumerate(records) if len(own)) + 1
