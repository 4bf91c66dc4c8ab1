"""The audit of one lane: its records against the numbering, the checkpoints, and the order of documents in each pool.

No lane needs anything of another, so that each may be compared in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.lane_state import LaneState
from hfdist.data.order.records import Records, Status, chain
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.data.stream.worker_deaths import WorkerRegistry
from hfdist.data.stream.worker_map import map_in_workers
from hfdist.verify.audit.discrepancies import Discrepancies, Discrepancy, Integers
from hfdist.verify.audit.ledger_sums import LedgerSums
from hfdist.verify.audit.pool_audit import PoolAudit


class LaneFindings(NamedTuple):
    """What the records of a lane have shown."""

    counts: Mapping[Discrepancy, int]
    """Number of discrepancies of each kind."""
    names: Mapping[Discrepancy, list[str]]
    """The first discrepancies of each kind, by name."""
    totals: LedgerSums
    """Sums of the lane's records by source."""
    numbers: Integers
    """Numbers within the lane of the sequences that have records. Shape [sequences]."""
    pools: NDArray[np.uint16]
    """Pool of each of these sequences, by its first record. Shape [sequences]."""
    finished: list[int]
    """Pools that the lane has read to their ends."""


@dataclass(frozen=True, kw_only=True)
class LaneAudits:
    """All lanes of a ledger, with what they are compared with."""

    ledger: Sequence[Records]
    """Records of each lane."""
    corpus: Corpus
    """The corpus that the run read."""
    plan: LanePlan
    """The run's plan."""
    cursors: Sequence[tuple[int, Cursor]]
    """Step and cursor of each checkpoint after the ledger's beginning, in order of the sequences that were read."""
    newest: Mapping[int, LaneState]
    """State of each lane in the newest checkpoint that has it, by lane."""
    ends: Sequence[int]
    """Number of each lane's sequences up to the end of what is audited."""
    begins_inside: bool
    """Whether the records begin in the middle of a run."""

    def check(self, processes: int) -> Iterator[LaneFindings]:
        """Compare all lanes; gives the findings of each, in order of lane.

        Args:
            processes: number of processes among which the lanes are dealt; 1: this one does all. Each of several has at
                most two lanes in hand or done ahead.

        Raises:
            ResourceError: a process has died.
        """
        workers = min(processes, len(self.ledger)) if processes > 1 else 0
        registry = WorkerRegistry(
            workers, lambda _: "which audits", key="processes", hint="more memory, or processes=1"
        )
        return map_in_workers(lambda lane: _LaneAudit(self, lane).check(), len(self.ledger), registry)


class _LaneAudit:
    """The comparison of one lane with the plan."""

    def __init__(self, audits: LaneAudits, lane: int) -> None:
        self._audits, self._lane, self._plan = audits, lane, audits.plan
        self._end, self._state = audits.ends[lane], audits.newest.get(lane)
        self._discrepancies, self._totals = Discrepancies(audits.corpus), LedgerSums(audits.corpus)

    def check(self) -> LaneFindings:
        """Compare everything, and give the findings."""
        records = self._audits.ledger[self._lane]
        # A run that was killed leaves records that no checkpoint counts; its next start would cut them off.
        records = self._readable(records[records["sequence"] < self._end])
        lane_sequences = _LaneSequences(records)
        self._check_numbering(lane_sequences)
        self._check_cursors(lane_sequences)
        self._totals.add(records)
        finished = [pool for pool in range(len(self._plan.pools)) if self._check_pool(records, pool)]
        found = self._discrepancies
        numbers, pools = lane_sequences.numbers, lane_sequences.pools.astype(np.uint16)
        return LaneFindings(found.counts, found.names, self._totals, numbers, pools, finished)

    def _readable(self, records: Records) -> Records:
        """Give the records that a run may have written; the others become discrepancies."""
        is_good = are_readable(records, len(self._plan.pools), self._audits.corpus.num_documents)
        bad = records[~is_good]
        self._discrepancies.add_documents(
            Discrepancy.unreadable, bad["document"], f", lane {self._lane}", bad["sequence"]
        )
        return records[is_good]

    def _check_numbering(self, lane_sequences: _LaneSequences) -> None:
        """Sequence numbers rise, and each sequence is of one pool. Missing ones are found over all lanes together."""
        numbers, records = lane_sequences.numbers, lane_sequences.records
        falls = np.flatnonzero(numbers[1:] <= numbers[:-1]) + 1
        names = (f"lane {self._lane}, sequence {numbers[n]} after {numbers[n - 1]}" for n in falls.tolist())
        self._discrepancies.add(Discrepancy.numbering, names, len(falls))
        owners = np.repeat(lane_sequences.pools, np.diff(lane_sequences.edges))
        mixed = np.unique(records["sequence"][records["pool"] != owners])
        self._discrepancies.add(
            Discrepancy.source, (f"lane {self._lane}, sequence {n}: of several" for n in mixed.tolist()), len(mixed)
        )

    def _check_cursors(self, lane_sequences: _LaneSequences) -> None:
        """The records up to each checkpoint are those that it has counted and digested."""
        # Where records begin in the middle of a run, only those after the first checkpoint can be compared.
        begins_inside = self._audits.begins_inside
        digest, begin, last_step = 0, 0, 0
        states = [
            (step, cursor.lanes[self._lane]) for step, cursor in self._audits.cursors if self._lane in cursor.lanes
        ]
        for step, state in sorted(states, key=lambda pair: pair[1].sequences):
            if state.sequences > self._end:
                # The last steps of an island may be in no exchange, and then they do not count.
                continue
            end = int(np.searchsorted(lane_sequences.numbers, state.sequences))
            if not (begins_inside and last_step == 0):
                if lane_sequences.digest(digest, begin, end) != state.digest:
                    self._discrepancies.add(
                        Discrepancy.digest, [f"lane {self._lane}, between steps {last_step} and {step}"], 1
                    )
                if not begins_inside and not lane_sequences.counts_agree(end, state):
                    self._discrepancies.add(
                        Discrepancy.cursor, [f"lane {self._lane}, step {step}: sequences or tokens of its sources"], 1
                    )
            # Go on from what the checkpoint says, so that later ones do not report the same difference again.
            digest, begin, last_step = state.digest, end, step

    def _check_pool(self, records: Records, pool: int) -> bool:
        """Check the documents of a lane in one pool; returns whether the lane has finished the pool."""
        place = None if self._state is None else self._state.pools[pool].place
        of_pool = records[records["pool"] == pool]
        audit = PoolAudit(
            records=of_pool,
            plan=self._plan,
            pool=pool,
            lane=self._lane,
            place=place,
            begins_inside=self._audits.begins_inside,
            discrepancies=self._discrepancies,
        )
        found = audit.check()
        if not found.agrees_with_place:
            name = f"lane {self._lane}, {self._plan.pools[pool].name}: the records do not end at {tuple(place or ())}"
            self._discrepancies.add(Discrepancy.cursor, [name], 1)
        return found.is_finished


def are_readable(records: Records, num_pools: int, num_documents: int) -> NDArray[np.bool_]:
    """Find the records that a run may have written, by their values alone."""
    ends = records["first_token"].astype(np.int64) + records["num_tokens"]
    gives_tokens = np.isin(records["fate"], [Status.trained, Status.quarantined])
    is_good = (records["first_token"] >= 0) & (records["num_tokens"] >= 0) & (ends <= records["of_tokens"])
    is_good &= (records["num_tokens"] > 0) == gives_tokens
    is_good &= (records["pool"] < num_pools) & (records["fate"] <= max(Status)) & (records["sequence"] >= 0)
    is_good &= (records["document"] >= 0) & (records["document"] < num_documents)
    return is_good


class _LaneSequences:
    """The records of a lane, grouped by sequence as they were written."""

    def __init__(self, records: Records) -> None:
        self.records, numbers = records, records["sequence"]
        inner = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        self.edges = np.array([0, *inner.tolist(), len(numbers)] if len(numbers) else [0], dtype=np.int64)
        """Index of the first record of each sequence, and then the number of records. Shape [sequences + 1]."""
        self.numbers: Integers = numbers[self.edges[:-1]]
        """Number of each sequence within the lane. Shape [sequences]."""
        self.pools: Integers = records["pool"][self.edges[:-1]].astype(np.int64)
        """Pool of each sequence, by its first record. Shape [sequences]."""
        token_ends = np.concatenate([[0], np.cumsum(records["num_tokens"], dtype=np.int64)])
        self._num_tokens = np.diff(token_ends[self.edges])

    def digest(self, digest: int, begin: int, end: int) -> int:
        """Give the digest of the records of sequences `begin` to `end`, chained to the digest of those before."""
        for first, stop in pairwise(self.edges[begin : end + 1].tolist()):
            digest = chain(digest, self.records[first:stop])
        return digest

    def counts_agree(self, end: int, state: LaneState) -> bool:
        """Whether the sequences before `end` have as many sequences and tokens by pool as a checkpoint says."""
        pools, num_pools = self.pools[:end], len(state.pools)
        sequences = np.bincount(pools, minlength=num_pools).tolist()
        tokens = np.bincount(pools, weights=self._num_tokens[:end], minlength=num_pools).astype(np.int64).tolist()
        return list(zip(sequences, tokens, strict=True)) == [(own.sequences, own.tokens) for own in state.pools]
