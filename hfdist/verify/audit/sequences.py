"""Sequences of the lanes against the plan: numbered without gap, of the source whose turn it was, as digested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hfdist.data.order.cursor import Cursor, LaneState
from hfdist.data.order.mixture import Mixture
from hfdist.data.order.records import Records, chain
from hfdist.verify.audit.findings import Findings, Kind

NO_POOL = -1


def num_in_lane(samples: int, lane: int, lanes: int) -> int:
    """How many of the first `samples` sequences of a run are a lane's."""
    return (samples - lane + lanes - 1) // lanes


@dataclass(frozen=True)
class Groups:
    """The records of a lane, one group for each sequence as they were written."""

    records: Records
    edges: NDArray[np.int64] = field(init=False)
    """Where groups begin, and where the last one ends. Shape [groups + 1]."""

    def __post_init__(self) -> None:
        numbers = self.records["sequence"]
        inner = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        ends = [0, *inner.tolist(), len(numbers)] if len(numbers) else [0]
        object.__setattr__(self, "edges", np.array(ends, dtype=np.int64))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Of the sequences."""
        return self.records["sequence"][self.edges[:-1]]

    @property
    def pools(self) -> NDArray[np.int64]:
        """From which the sequences are, by their first records."""
        return self.records["pool"][self.edges[:-1]].astype(np.int64)

    def tokens(self) -> NDArray[np.int64]:
        """Of the sequences."""
        totals = np.concatenate([[0], np.cumsum(self.records["num_tokens"], dtype=np.int64)])
        return np.diff(totals[self.edges])


def check_numbering(groups: Groups, lane: int, findings: Findings) -> None:
    """Sequences rise, and each is of one pool. Whether any is missing is seen where sources take turns."""
    numbers = groups.numbers
    falls = np.flatnonzero(numbers[1:] <= numbers[:-1]) + 1
    names = (f"lane {lane}, sequence {numbers[n]} behind {numbers[n - 1]}" for n in falls.tolist())
    findings.add(Kind.numbering, names, len(falls))
    owners = np.repeat(groups.pools, np.diff(groups.edges))
    mixed = np.unique(groups.records["sequence"][groups.records["pool"] != owners])
    findings.add(Kind.source, (f"lane {lane}, sequence {n}: of several" for n in mixed.tolist()), len(mixed))


def check_cursors(
    groups: Groups, lane: int, cursors: Mapping[int, Cursor], findings: Findings, *, begins_inside: bool
) -> None:
    """The records up to each checkpoint are those that it has counted and digested.

    Args:
        groups: of the lane.
        lane: its number.
        cursors: of the checkpoints, by their steps, rising.
        findings: take what is wrong.
        begins_inside: the records begin in the middle of a run, so that only those behind the first checkpoint can be
            compared.
    """
    digest, begin, last_step = 0, 0, 0
    pools, tokens = groups.pools, groups.tokens()
    for step, cursor in cursors.items():
        state = cursor.lanes[lane]
        end = int(np.searchsorted(groups.numbers, num_in_lane(cursor.samples, lane, cursor.num_lanes)))
        if not (begins_inside and last_step == 0):
            digest = _digest(digest, groups, begin, end)
            if digest != state.digest:
                findings.add(Kind.digest, [f"lane {lane}, between steps {last_step} and {step}"], 1)
            if not begins_inside and _counts(pools[:end], tokens[:end], state) != _expected(state):
                findings.add(Kind.cursor, [f"lane {lane}, step {step}: sequences or tokens of its sources"], 1)
        # From here on as the checkpoint says, so that one difference is not told again at each later one.
        digest, begin, last_step = state.digest, end, step


def _digest(digest: int, groups: Groups, begin: int, end: int) -> int:
    edges = groups.edges[begin : end + 1].tolist()
    for first, stop in pairwise(edges):
        digest = chain(digest, groups.records[first:stop])
    return digest


def _counts(pools: NDArray[np.int64], tokens: NDArray[np.int64], state: LaneState) -> list[tuple[int, int]]:
    sequences = np.bincount(pools, minlength=len(state.pools)).tolist()
    sums = np.bincount(pools, weights=tokens, minlength=len(state.pools)).tolist()
    return [(num, int(total)) for num, total in zip(sequences, sums, strict=True)]


def _expected(state: LaneState) -> list[tuple[int, int]]:
    return [(progress.sequences, progress.tokens) for progress in state.pools]


@dataclass(frozen=True)
class Turns:
    """From which pool each sequence of a stretch of the run was.

    Args:
        first_sample: number of the first sequence.
        pools: of each sequence from there on; `NO_POOL` where there are no records. Shape [sequences].
        finished: of each lane, its pools that have come to their end within these sequences or before.
    """

    first_sample: int
    pools: NDArray[np.int64]
    finished: Mapping[int, frozenset[int]]


def check_turns(turns: Turns, mixture: Mixture, *, lanes: int, num_pools: int, findings: Findings) -> None:
    """Each sequence is of the pool that the mixture picks among those that its lane has not finished."""
    missing: list[int] = []
    wrong: list[int] = []
    for sample in _out_of_turn(turns, mixture, lanes, num_pools):
        is_missing = turns.pools[sample - turns.first_sample] == NO_POOL
        (missing if is_missing else wrong).append(sample)
    for kind, samples in ((Kind.numbering, missing), (Kind.source, wrong)):
        names = (f"lane {sample % lanes}, sequence {sample // lanes}" for sample in samples)
        findings.add(kind, names, len(samples))


def _out_of_turn(turns: Turns, mixture: Mixture, lanes: int, num_pools: int) -> Iterator[int]:
    last_samples = {
        (lane, pool): _last_sample(turns, lane, pool, lanes) for lane in range(lanes) for pool in turns.finished[lane]
    }
    available = {
        lane: tuple(pool for pool in range(num_pools) if last_samples.get((lane, pool), 0) >= 0)
        for lane in range(lanes)
    }
    if num_pools == 1 and not last_samples:
        yield from (turns.first_sample + np.flatnonzero(turns.pools != 0)).tolist()
        return
    for sample, found in enumerate(turns.pools.tolist(), turns.first_sample):
        lane = sample % lanes
        pool = mixture.pick(sample, available[lane])
        if found != (NO_POOL if pool is None else pool):
            yield sample
        if last_samples.get((lane, found)) == sample:
            available[lane] = tuple(other for other in available[lane] if other != found)


def _last_sample(turns: Turns, lane: int, pool: int, lanes: int) -> int:
    """The lane's last sequence of a pool; -1: it has none."""
    first = (lane - turns.first_sample) % lanes
    own = np.flatnonzero(turns.pools[first::lanes] == pool)
    return turns.first_sample + first + int(own[-1]) * lanes if len(own) else -1
