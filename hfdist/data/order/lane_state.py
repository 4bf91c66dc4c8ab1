"""How far a lane has come, as an object; and how far many lanes have come, as columns of whole numbers.

    lane  digest | epoch  position  offset  sequences  tokens  documents
       0  8f03.. | [ 0 1]   [ 7 2]   [ 0 5]     ...       ...      ...       a number for each pool

Thousands of lanes of a hundred sources are millions of numbers: each column has the narrowest type that holds its
numbers, and the object of a lane is built when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.whole_numbers import MOST

Columns = Mapping[str, NDArray[np.unsignedinteger[Any]]]
"""Columns `lane` and `digest` of shape [lanes], and those in `_OF_POOLS` of shape [lanes, pools]; all unsigned."""

_OF_POOLS = ("epoch", "position", "offset", "sequences", "tokens", "documents")
"""Columns with a number for each pool: the fields of `Place`, then the other fields of `Progress`."""
_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
"""Types of columns, the narrowest first."""


class Place(NamedTuple):
    """The place in one pool of documents at which the next sequence of a lane begins."""

    epoch: int = 0
    """Number of whole passes of this lane over its documents."""
    position: int = 0
    """Number of the document in the lane's order of this epoch."""
    offset: int = 0
    """Number of the token inside that document. Where documents are packed by windows: number of the sequence inside
    the window that begins at `position`."""


class Progress(NamedTuple):
    """How far a lane has come in one pool."""

    place: Place = Place()
    sequences: int = 0
    """Sequences given so far."""
    tokens: int = 0
    """Tokens in these sequences, without filling."""
    documents: int = 0
    """Documents that were begun in these sequences, or passed over before them."""


class LaneState(NamedTuple):
    """How far a lane has come."""

    digest: int
    """Digest of the records of all sequences so far, in [0, 2**64)."""
    pools: tuple[Progress, ...]
    """How far the lane has come in each pool."""
    sequences: int
    """Sequences given so far, with those without a target that come after the lane's end."""


def to_columns(lanes: Mapping[int, LaneState]) -> dict[str, NDArray[Any]]:
    """Give the states of lanes as columns, in the order of the lanes' numbers; all lanes must have the same pools.

    A lane's own number of `sequences` is not in them: most often it follows from the samples of the run.
    """
    order = sorted(lanes)
    num_pools = len(lanes[order[0]].pools) if order else 0
    # Number by number: training waits, and lists of lists take three times as long.
    numbers = chain.from_iterable((*pool.place, *pool[1:]) for lane in order for pool in lanes[lane].pools)
    of_pools = np.fromiter(numbers, dtype=np.uint64).reshape(len(order), num_pools, len(_OF_POOLS))
    columns = {name: _narrow(of_pools[:, :, number]) for number, name in enumerate(_OF_POOLS)}
    digests = np.array([lanes[lane].digest for lane in order], dtype=np.uint64)
    return {"lane": _narrow(np.array(order, dtype=np.uint64)), "digest": digests, **columns}


def _narrow(values: NDArray[np.uint64]) -> NDArray[np.unsignedinteger[Any]]:
    """Give the values in the narrowest type that holds all of them."""
    most = int(values.max(initial=0))
    narrowest = next(dtype for dtype in _TYPES if most <= np.iinfo(dtype).max)
    return np.ascontiguousarray(values, dtype=narrowest)


def check_columns(columns: Columns) -> None:
    """Check columns that were read from a file, before anything is built from them.

    ValueError, TypeError: `to_columns` does not give such columns.
    """
    if columns.keys() != {"lane", "digest", *_OF_POOLS}:
        raise ValueError(f"columns {', '.join(sorted(columns))}")
    if any(column.dtype not in _TYPES for column in columns.values()) or columns["digest"].dtype != np.uint64:
        raise TypeError("columns of another type")
    lanes = columns["lane"]
    shape, *other_shapes = {columns[name].shape for name in _OF_POOLS}
    if lanes.ndim != 1 or columns["digest"].shape != lanes.shape or other_shapes:
        raise ValueError("columns of unlike length")
    if len(shape) != 2 or shape[0] != len(lanes):
        raise ValueError(f"columns of shape {list(shape)} for {len(lanes)} lanes")
    if any(int(columns[name].max(initial=0)) > MOST for name in ("lane", *_OF_POOLS)):
        raise ValueError("a number over 2**53 - 1")
    if (lanes[1:] <= lanes[:-1]).any():
        raise ValueError("lanes out of order, or twice")


class LanesInColumns(Mapping[int, LaneState]):
    """The states of lanes by number, from the columns of `to_columns`; each is built when it is asked for.

    A rank asks for the few lanes that it reads.

    Args:
        columns: columns that `check_columns` has accepted.
        sequences: the number of sequences of each lane, in the order of the columns; see `LaneState.sequences`.

    Raises:
        ValueError: there are more or fewer `sequences`.
    """

    def __init__(self, columns: Columns, sequences: Sequence[int] | NDArray[np.int64]) -> None:
        self._columns, self._lanes = columns, columns["lane"].astype(np.int64)
        self._sequences = np.asarray(sequences, dtype=np.int64)
        if len(self._sequences) != len(self._lanes):
            raise ValueError(f"{len(self._sequences)} numbers of sequences for {len(self._lanes)} lanes")

    def __getitem__(self, lane: int) -> LaneState:
        """Build the state of a lane."""
        row = int(np.searchsorted(self._lanes, lane))
        if row == len(self._lanes) or self._lanes[row] != lane:
            raise KeyError(lane)
        columns = [self._columns[name][row].tolist() for name in _OF_POOLS]
        pools = tuple(
            Progress(Place(epoch, position, offset), sequences, tokens, documents)
            for epoch, position, offset, sequences, tokens, documents in zip(*columns, strict=True)
        )
        return LaneState(digest=int(self._columns["digest"][row]), pools=pools, sequences=int(self._sequences[row]))

    def __iter__(self) -> Iterator[int]:
        """Give the lanes' numbers."""
        return map(int, self._lanes)

    def __len__(self) -> int:
        """Number of lanes."""
        return len(self._lanes)
