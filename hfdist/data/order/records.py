"""Records of the pieces of documents that a sequence was made of, and of documents that were passed over."""

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

sequence      number of the sequence among the sequences of its lane
document      canonical number of the document
first_token   place of the piece's first token in the document
num_tokens    number of tokens of the piece; 0: the document is passed over
of_tokens     number of tokens of the whole document
epoch         epoch of the lane in which the document is read
pool          number of the document's pool
fate          `Status` of the document
"""

Records = NDArray[np.void]
"""Array of RECORD, of shape [pieces]."""


def make_records(num_records: int, **columns: ArrayLike) -> Records:
    """Make records of columns, each named as its field and of shape [records]; fields without a column are 0."""
    records = np.zeros(num_records, dtype=RECORD)
    for name, values in columns.items():
        records[name] = values
    return records


def join(records: Sequence[Records]) -> Records:
    """Concatenate contiguous arrays of records into a new array."""
    # Bytes are joined, as `numpy.concatenate` would compare the arrays' fields first. A bytearray can be written to.
    return np.frombuffer(bytearray().join([array.data for array in records]), dtype=RECORD)


def chain(digest: int, records: Records, stops: Sequence[int] | None = None) -> int:
    """Give the digest of a lane after more sequences: digest n + 1 is a hash of digest n and the records of a sequence.

    Args:
        digest: the lane's digest before them, in [0, 2**64), as all digests.
        records: the records of the sequences, in order.
        stops: the end of each sequence in the records; None: all are of one sequence.
    """
    if stops is None:
        stops = [len(records)]
    chained = digest.to_bytes(8, "little")
    start = 0
    for stop in stops:
        hashed = hashlib.blake2b(chained, digest_size=8)
        hashed.update(records.data[start:stop])
        chained = hashed.digest()
        start = stop
    return int.from_bytes(chained, "little")


def count_new_documents(records: Records) -> int:
    """Count the documents that begin in these records, or are passed over: both have a record of their first token."""
    return int(np.count_nonzero(records["first_token"] == 0))


def numbers_of(records: Records) -> NDArray[np.int64]:
    """Give the canonical numbers of the documents of which a sequence holds pieces, in their order; shape [pieces]."""
    numbers: NDArray[np.int64] = records["document"][records["num_tokens"] > 0]
    return numbers
