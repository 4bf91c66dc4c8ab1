"""What a sequence was made of: one record for each piece of a document, and for each document passed over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Status(IntEnum):
    """The fate of a document: whether it was trained on, or why not."""

    trained = 0
    held_out = 1
    """The document is on the other side of the held-out split."""
    empty = 2
    """The document has no text."""
    bad = 3
    """The row cannot be read, and `data.on_bad_rows` leaves such rows out."""
    quarantined = 4
    """The row is named in `data.quarantine`: its tokens keep their places, without their values and targets."""
    too_long = 5
    """The document is longer than a sequence, and `data.too_long` leaves such documents out."""
    no_target = 6
    """The document is an example without a target, or without one that `data.too_long` has left."""


RECORD = np.dtype(
    [
        ("sequence", "<i8"),
        ("document", "<i8"),
        ("first_token", "<i4"),
        ("num_tokens", "<i4"),
        ("of_tokens", "<i4"),
        ("epoch", "<u4"),
        ("pool", "<u2"),
        ("fate", "<u2"),
    ]
)
"""A record of 36 bytes, as the ledger's files have it.

sequence      number of the sequence among those of its lane
document      canonical number
first_token   place of the piece's first token in the document
num_tokens    tokens of the piece; 0: the document is passed over
of_tokens     tokens of the whole document
epoch, pool   of the document
fate          its `Status`
"""

Records = NDArray[np.void]
"""Array of RECORD, of shape [pieces]."""


def make_records(num_records: int, **columns: ArrayLike) -> Records:
    """Make records of columns; fields without a column are 0."""
    records = np.zeros(num_records, dtype=RECORD)
    for name, values in columns.items():
        records[name] = values
    return records


def join(records: Sequence[Records]) -> Records:
    """Concatenate contiguous arrays of records: a copy."""
    # `numpy.concatenate` would compare their fields first.
    return np.frombuffer(bytearray().join([one.data for one in records]), dtype=RECORD)


def chain(digest: int, records: Records, stops: Sequence[int] | None = None) -> int:
    """Give the digest of a lane after `records`, from the one before them. Digests are in [0, 2**64).

    `stops` says where each sequence ends in the records; None: they are of one sequence.
    """
    content, start, last = records.data, 0, digest.to_bytes(8, "little")
    for stop in [len(records)] if stops is None else stops:
        hashed = hashlib.blake2b(last, digest_size=8)
        hashed.update(content[start:stop])
        start, last = stop, hashed.digest()
    return int.from_bytes(last, "little")


def count_new_documents(records: Records) -> int:
    """Count the documents that begin in these records, or are passed over."""
    return int(np.count_nonzero(records["first_token"] == 0))


def numbers_of(records: Records) -> NDArray[np.int64]:
    """Give the documents that a sequence holds, in their order; shape [pieces]."""
    numbers: NDArray[np.int64] = records["document"][records["num_tokens"] > 0]
    return numbers
