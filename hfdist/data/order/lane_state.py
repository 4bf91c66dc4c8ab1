"""How far a lane has come; and the same of many lanes as columns of whole numbers, from which a lane is built if asked.

Thousands of lanes of a hundred sources are millions of numbers. Each column has the narrowest type that holds its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.whole_numbers import MOST

Columns = Mapping[str, NDArray[Any]]
"""`lane` and `digest` of shape [lanes], and each of `_OF_POOLS` of shape [lanes, pools]; all unsigned."""

_OF_POOLS = ("epoch", "position", "offset", "sequences", "tokens", "documents")
_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


class Place(NamedTuple):
    """Where the next sequence of a lane begins, in one pool of documents."""

    epoch: int = 0
    """Passes of this lane over its documents."""
    position: int = 0
    """Document, counted in the lane's order of this epoch."""
    offset: int = 0
    """Token inside that document; of a window packing: sequence inside the window that begins at `position`."""


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
    """Digest of the records of all sequences so far: see `records.chain`."""
    pools: tuple[Progress, ...]
    sequences: int
    """Sequences given so far, with those without a target that come after the lane's end."""


def to_columns(lanes: Mapping[int, LaneState]) -> dict[str, NDArray[Any]]:
    """Give lanes, of which all have the same pools, as columns in order of their numbers, without `sequences`."""
    order = sorted(lanes)
    num_pools = len(lanes[order[0]].pools) if order else 0
    # Number by number: training waits, and lists of lists take three times as long.
    numbers = chain.from_iterable((*pool.place, *pool[1:]) for lane in order for pool in lanes[lane].pools)
    of_pools = np.fromiter(numbers, dtype=np.uint64).reshape(len(order), num_pools, len(_OF_POOLS))
    columns = {name: _narrow(of_pools[:, :, number]) for number, name in enumerate(_OF_POOLS)}
    digests = np.array([lanes[lane].digest for lane in order], dtype=np.uint64)
    return {"lane": _narrow(np.array(order, dtype=np.uint64)), "digest": digests, **columns}


def _narrow(values: NDArray[np.uint64]) -> NDArray[Any]:
    most = int(values.max(initial=0))
    kind = next(kind for kind in _TYPES if most <= np.iinfo(kind).max)
    return np.ascontiguousarray(values, dtype=kind)


def check_columns(columns: Columns) -> None:
    """Refuse what `to_columns` does not give, before anything is built from it; a ValueError or TypeError."""
    if columns.keys() != {"lane", "digest", *_OF_POOLS}:
        raise ValueError(f"columns {', '.join(sorted(columns))}")
    if any(column.dtype not in _TYPES for column in columns.values()) or columns["digest"].dtype != np.uint64:
        raise TypeError("columns of another type")
    lanes, shapes = columns["lane"], {columns[name].shape for name in _OF_POOLS}
    if lanes.ndim != 1 or columns["digest"].shape != lanes.shape or len(shapes) != 1:
        raise ValueError("columns of unlike length")
    if len(shape := shapes.pop()) != 2 or shape[0] != len(lanes):
        raise ValueError(f"columns of shape {list(shape)} for {len(lanes)} lanes")
    if any(int(columns[name].max(initial=0)) > MOST for name in ("lane", *_OF_POOLS)):
        raise ValueError("a number over 2**53 - 1")
    if (lanes[1:] <= lanes[:-1]).any():
        raise ValueError("lanes out of order, or twice")


class LanesInColumns(Mapping[int, LaneState]):
    """Lanes as `to_columns` gave them: each is built when it is asked for, as a rank reads a few of them.

    Args:
        columns: as they stood in a file, and were checked.
        sequences: of each lane, in the same order.

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
        of_pools = zip(*(self._columns[name][row].tolist() for name in _OF_POOLS), strict=True)
        pools = tuple(Progress(Place(*numbers[:3]), *numbers[3:]) for numbers in of_pools)
        return LaneState(digest=int(self._columns["digest"][row]), pools=pools, sequences=int(self._sequences[row]))

    def __iter__(self) -> Iterator[int]:
        """Give the lanes' numbers."""
        return map(int, self._lanes)

    def __len__(self) -> int:
        """Number of lanes."""
        return len(self._lanes)
