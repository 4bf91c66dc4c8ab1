"""Runs of neighbouring rows, cheap to read together, of all shards of a corpus; in arrays, for a million files.

shards      | shard 0 |  shard 1   |
rows        |  1024   | 1024 | 300 |
per_shard        1           2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """The runs of rows of some shards, in canonical order."""

    rows: NDArray[np.int64]
    """Number of rows of each run, shape [runs]."""
    per_shard: NDArray[np.int64]
    """Number of runs of each shard, shape [shards]."""

    @classmethod
    def of(cls, shards: Iterable[Sequence[int]]) -> Runs:
        """Make runs from the numbers of rows of each shard's runs."""
        rows_of_shards = list(shards)
        rows = np.fromiter(chain.from_iterable(rows_of_shards), dtype=np.int64)
        return cls(rows, np.array([len(runs) for runs in rows_of_shards], dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Runs]) -> Runs:
        """Put the shards of several parts of a corpus end to end."""
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, dtype=np.int64)
        return cls(
            np.concatenate([none, *(part.rows for part in parts)]),
            np.concatenate([none, *(part.per_shard for part in parts)]),
        )

    @property
    def rows_per_shard(self) -> NDArray[np.int64]:
        """Number of rows of each shard, shape [shards]."""
        return _sums(self.rows, self.per_shard)

    def cut(self, most_rows: int) -> Runs:
        """Cut each run into runs of `most_rows` rows, of which its last one may be shorter."""
        num_blocks = -(-self.rows // most_rows)
        sizes = np.full(int(num_blocks.sum()), most_rows, dtype=np.int64)
        has_rows = num_blocks > 0
        last_blocks = np.cumsum(num_blocks)[has_rows] - 1
        sizes[last_blocks] = (self.rows - (num_blocks - 1) * most_rows)[has_rows]
        return Runs(sizes, _sums(num_blocks, self.per_shard))


def _sums(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum neighbouring values, `counts[i]` of them to sum i; shape as of `counts`."""
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
    ends = np.cumsum(counts)
    sums: NDArray[np.int64] = before[ends] - before[ends - counts]
    return sums
