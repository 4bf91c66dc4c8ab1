"""Runs of rows that are cheap to read together, of all shards of a corpus, as arrays: it may have a million files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """Runs of shards, in canonical order."""

    rows: NDArray[np.int64]
    """Rows of each run, shape [runs]."""
    per_shard: NDArray[np.int64]
    """Number of runs of each shard, shape [shards]."""

    @classmethod
    def of(cls, shards: Iterable[Sequence[int]]) -> Runs:
        """Take the runs of each shard."""
        listed = [*shards]
        rows = np.fromiter((rows for runs in listed for rows in runs), dtype=np.int64)
        return cls(rows, np.array([len(runs) for runs in listed], dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Runs]) -> Runs:
        """Put the shards of several end to end."""
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, dtype=np.int64)
        return cls(
            np.concatenate([none, *(part.rows for part in parts)]),
            np.concatenate([none, *(part.per_shard for part in parts)]),
        )

    @property
    def rows_per_shard(self) -> NDArray[np.int64]:
        """Rows of each shard, shape [shards]."""
        return _sums(self.rows, self.per_shard)

    def cut(self, most_rows: int) -> Runs:
        """Split each run into blocks of `most_rows`, which are the runs of the result; the last may be smaller."""
        blocks = -(-self.rows // most_rows)
        sizes = np.full(int(blocks.sum()), most_rows, dtype=np.int64)
        has_rows = blocks > 0
        sizes[np.cumsum(blocks)[has_rows] - 1] = (self.rows - (blocks - 1) * most_rows)[has_rows]
        return Runs(sizes, _sums(blocks, self.per_shard))


def _sums(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum so many neighbours each time."""
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
    ends = np.cumsum(counts)
    sums: NDArray[np.int64] = before[ends] - before[ends - counts]
    return sums
