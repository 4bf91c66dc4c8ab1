"""What a sequence was made of: one record for each piece of a document, and for each document passed over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Status(IntEnum):
    """Whether a document was trained on, or why not."""

    trained = 0
    held_out = 1
    """The document is on the other side of the held-out split."""
    empty = 2
    """The document has no text."""
    bad = 3
    """The row cannot be read, and `data.on_bad_rows` leaves such rows out."""
    quarantined = 4
    """Named in `data.quarantine`: its tokens keep their places, without their values and targets."""
    too_long = 5
    """Longer than a sequence, and `data.too_long` leaves such documents out."""
    no_target = 6
    """An example of which no token is a target, or none that `data.too_long` has left."""


RECORD = np.dtype(
    [
        ("sequence", "<i8"),  # counted in the lane
        ("document", "<i8"),  # canonical number
        ("first_token", "<i4"),
        ("num_tokens", "<i4"),  # 0: passed over
        ("of_tokens", "<i4"),  # all that the document has
        ("epoch", "<u4"),
        ("pool", "<u2"),
        ("fate", "<u2"),
    ]
)
"""36 bytes, the form of the ledger's files."""

Records = NDArray[np.void]
"""Shape [pieces], of dtype RECORD."""


def make_records(num_records: int, **columns: ArrayLike) -> Records:
    """Make records of columns; fields without a column are 0."""
    records = np.zeros(num_records, dtype=RECORD)
    for name, values in columns.items():
        records[name] = values
    return records


def join(records: Sequence[Records]) -> Records:
    """Concatenate records: a copy. `numpy.concatenate` would compare their fields first."""
    return np.frombuffer(bytearray().join([one.data for one in records]), dtype=RECORD)


def chain(digest: int, records: Records) -> int:
    """Digest of a lane's records so far: that before `records` and these; both in [0, 2**64)."""
    joined = digest.to_bytes(8, "little") + records.tobytes()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")


def count_begun(records: Records) -> int:
    """Count the documents that begin in these records, or are passed over."""
    return int(np.count_nonzero(records["first_token"] == 0))


def numbers_of(records: Records) -> NDArray[np.int64]:
    """Give the documents that a sequence holds, in their order; shape [pieces]."""
    numbers: NDArray[np.int64] = records["document"][records["num_tokens"] > 0]
    return numbers
