"""The proof that a run read every document as often as planned: its ledger against the arithmetic of its order.

Sequences are numbered without a gap, each is of the source whose turn it was, its documents are those of the order (see
`pool_audit`), and checkpoints have digested the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.lane_state import LaneState
from hfdist.data.order.records import Records, Status, chain
from hfdist.data.stream.lane import LanePlan
from hfdist.errors import DataError
from hfdist.verify.audit.discrepancies import Discrepancies, Discrepancy, Integers
from hfdist.verify.audit.ledger_sums import LedgerSums
from hfdist.verify.audit.pool_audit import PoolAudit

_NO_POOL = -1
_MOST_MISSING = 2**20
"""Sequences without a record that are listed, and more where there are many records."""


class Audit:
    """Compares a ledger with the plan: one pass over the lanes, then over what all lanes share.

    Args:
        ledger: records of all lanes.
        corpus: that the run read.
        plan: of the run; only its orders, its mixture and its settings are used.
        cursors: of the run's checkpoints, with their steps; of islands those of all runs.
        identity: of the run's data as they are now.
        global_batch_size: sequences in a step.
        takes_turns: whether all lanes have given equally many sequences, as in one run.

    Raises:
        DataError: the data, the tokenizer or data.* have changed since; or most of the ledger is missing.
    """

    def __init__(
        self,
        ledger: Sequence[Records],
        corpus: Corpus,
        plan: LanePlan,
        cursors: Iterable[tuple[int, Cursor]],
        *,
        identity: str,
        global_batch_size: int,
        takes_turns: bool = True,
    ) -> None:
        begin = first_sample(ledger)
        # Earlier checkpoints are of what was read before the ledger begins.
        later = [(step, cursor) for step, cursor in cursors if cursor.samples > begin]
        self._cursors = sorted(later, key=lambda pair: pair[1].samples)
        for step, cursor in self._cursors:
            if cursor.identity != identity:
                raise DataError(
                    "the data, the tokenizer or data.* have changed since the run",
                    where=f"the checkpoint of step {step}",
                    found=identity,
                    allowed=cursor.identity,
                    hint="an audit needs the data as the run read them",
                )
        self._ledger, self._corpus, self._plan = ledger, corpus, plan
        self._lanes = len(ledger)
        self.discrepancies, self.totals = Discrepancies(corpus), LedgerSums(corpus)
        # An island that has a parameter server knows its own lanes only.
        self._newest = {lane: cursor.lanes[lane] for _, cursor in self._cursors for lane in cursor.lanes}
        self.first_sample = begin // global_batch_size * global_batch_size
        """Not 0: the run began from another run's checkpoint. A run begins with a whole step: a sequence of that step
        that has no records is missing."""
        end = _end_sample(ledger)
        self._ends = [
            self._newest[lane].sequences if lane in self._newest
            else self._before(end, lane) if takes_turns
            else int(own["sequence"][-1]) + 1 if len(own) else 0
            for lane, own in enumerate(ledger)
        ]  # fmt: skip
        """Sequences of each lane up to the end of what was audited."""
        begins = [self._before(self.first_sample, lane) for lane in range(self._lanes)]
        self.num_sequences = sum(max(end - begin, 0) for begin, end in zip(begins, self._ends, strict=True))
        last = max((number - 1) * self._lanes + lane for lane, number in enumerate(self._ends))
        # An island has the records of its own lanes alone, and the numbers of all.
        with_records = sum(len(own) > 0 for own in ledger)
        _check_number(last + 1 - self.first_sample, sum(map(len, ledger)) * self._lanes // with_records)
        turns = np.full(max(last + 1 - self.first_sample, 0), _NO_POOL)
        finished = {lane: self._check_lane(lane, turns) for lane in range(self._lanes)}
        self._check_turns(turns, finished)
        self._check_plan()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.discrepancies.counts

    def _check_lane(self, lane: int, turns: Integers) -> list[int]:
        """Check one lane, and write the pools of its sequences into `turns`; returns the pools that it has finished."""
        records = self._ledger[lane]
        # A kill left what no checkpoint counts; the next start would truncate it.
        records = records[records["sequence"] < self._ends[lane]]
        records = self._readable(records, lane)
        lane_sequences = _LaneSequences(records)
        self._check_numbering(lane_sequences, lane)
        self._check_cursors(lane_sequences, lane)
        samples = lane_sequences.numbers * self._lanes + lane - self.first_sample
        turns[samples[samples >= 0]] = lane_sequences.pools[samples >= 0]
        self.totals.add(records)
        return [pool for pool in range(len(self._plan.pools)) if self._check_pool(records, lane, pool)]

    def _before(self, samples: int, lane: int) -> int:
        """How many of the first `samples` sequences of a run are a lane's, if lanes take turns."""
        return (samples - lane + self._lanes - 1) // self._lanes

    def _readable(self, records: Records, lane: int) -> Records:
        """Records without those that no run writes."""
        ends = records["first_token"].astype(np.int64) + records["num_tokens"]
        gives_tokens = np.isin(records["fate"], [Status.trained, Status.quarantined])
        is_good = (records["first_token"] >= 0) & (records["num_tokens"] >= 0) & (ends <= records["of_tokens"])
        is_good &= (records["num_tokens"] > 0) == gives_tokens
        is_good &= (
            (records["pool"] < len(self._plan.pools)) & (records["fate"] <= max(Status)) & (records["sequence"] >= 0)
        )
        is_good &= (records["document"] >= 0) & (records["document"] < self._corpus.num_documents)
        bad = records[~is_good]
        self.discrepancies.add_documents(Discrepancy.unreadable, bad["document"], f", lane {lane}", bad["sequence"])
        return records[is_good]

    def _check_numbering(self, lane_sequences: _LaneSequences, lane: int) -> None:
        """Sequence numbers rise, and each sequence is of one pool. `_check_turns` sees whether any is missing."""
        numbers, records = lane_sequences.numbers, lane_sequences.records
        falls = np.flatnonzero(numbers[1:] <= numbers[:-1]) + 1
        names = (f"lane {lane}, sequence {numbers[n]} after {numbers[n - 1]}" for n in falls.tolist())
        self.discrepancies.add(Discrepancy.numbering, names, len(falls))
        owners = np.repeat(lane_sequences.pools, np.diff(lane_sequences.edges))
        mixed = np.unique(records["sequence"][records["pool"] != owners])
        self.discrepancies.add(
            Discrepancy.source, (f"lane {lane}, sequence {n}: of several" for n in mixed.tolist()), len(mixed)
        )

    def _check_cursors(self, lane_sequences: _LaneSequences, lane: int) -> None:
        """The records up to each checkpoint are those that it has counted and digested."""
        # Of records that begin in the middle of a run, only those after the first checkpoint can be compared.
        begins_inside = self.first_sample > 0
        digest, begin, last_step = 0, 0, 0
        states = [(step, cursor.lanes[lane]) for step, cursor in self._cursors if lane in cursor.lanes]
        for step, state in sorted(states, key=lambda pair: pair[1].sequences):
            if state.sequences > self._ends[lane]:
                # Of an island whose last steps do not count.
                continue
            end = int(np.searchsorted(lane_sequences.numbers, state.sequences))
            if not (begins_inside and last_step == 0):
                if lane_sequences.digest(digest, begin, end) != state.digest:
                    self.discrepancies.add(
                        Discrepancy.digest, [f"lane {lane}, between steps {last_step} and {step}"], 1
                    )
                if not begins_inside and not lane_sequences.counts_agree(end, state):
                    self.discrepancies.add(
                        Discrepancy.cursor, [f"lane {lane}, step {step}: sequences or tokens of its sources"], 1
                    )
            # Go on from what the checkpoint says, so that later ones do not report the same difference again.
            digest, begin, last_step = state.digest, end, step

    def _check_pool(self, records: Records, lane: int, pool: int) -> bool:
        """Check the documents of a lane in one pool; returns whether the lane has finished the pool."""
        place = self._newest[lane].pools[pool].place if lane in self._newest else None
        own = records[records["pool"] == pool]
        check = PoolAudit(own, self._plan, pool, lane, place, begins_inside=self.first_sample > 0)
        check.check(self.discrepancies)
        if not check.agrees_with_place:
            name = f"lane {lane}, {self._plan.pools[pool].name}: the records do not end at {tuple(place or ())}"
            self.discrepancies.add(Discrepancy.cursor, [name], 1)
        return check.is_finished

    def _check_turns(self, turns: Integers, finished: Mapping[int, Sequence[int]]) -> None:
        """Each sequence is of the pool that the mixture picks among those that its lane has not finished.

        Args:
            turns: pool of each sequence from `first_sample` on; `_NO_POOL` where there are no records. [sequences]
            finished: pools that each lane has finished within these sequences or before.
        """
        wrong = np.array(list(self._out_of_turn(turns, finished)), dtype=np.int64)
        is_missing = turns[wrong - self.first_sample] == _NO_POOL
        for kind, samples in ((Discrepancy.numbering, wrong[is_missing]), (Discrepancy.source, wrong[~is_missing])):
            names = (f"lane {sample % self._lanes}, sequence {sample // self._lanes}" for sample in samples.tolist())
            self.discrepancies.add(kind, names, len(samples))

    def _out_of_turn(self, turns: Integers, finished: Mapping[int, Sequence[int]]) -> Iterator[int]:
        lanes, num_pools = self._lanes, len(self._plan.pools)
        last_samples = {
            (lane, pool): self._last_sample(turns, lane, pool) for lane in range(lanes) for pool in finished[lane]
        }
        if num_pools == 1 and not last_samples:
            samples = self.first_sample + np.flatnonzero(turns != 0)
            yield from samples[samples // lanes < np.array(self._ends)[samples % lanes]].tolist()
            return
        available = {
            lane: tuple(pool for pool in range(num_pools) if last_samples.get((lane, pool), 0) >= 0)
            for lane in range(lanes)
        }
        for sample, found in enumerate(turns.tolist(), self.first_sample):
            number, lane = divmod(sample, lanes)
            if number >= self._ends[lane]:
                continue
            pool = self._plan.mixture.pick(sample, available[lane])
            if found != (_NO_POOL if pool is None else pool):
                yield sample
            if last_samples.get((lane, found)) == sample:
                available[lane] = tuple(other for other in available[lane] if other != found)

    def _last_sample(self, turns: Integers, lane: int, pool: int) -> int:
        """The lane's last sequence of a pool; -1: it has none."""
        first = (lane - self.first_sample) % self._lanes
        own = np.flatnonzero(turns[first :: self._lanes] == pool)
        return self.first_sample + first + int(own[-1]) * self._lanes if len(own) else -1

    def _check_plan(self) -> None:
        """All lanes together have each document of a pool once in an epoch."""
        for number, (pool, order) in enumerate(zip(self._plan.pools, self._plan.orders, strict=True)):
            num_documents = pool.num_documents
            for epoch in sorted(self.totals.epochs.get(number, ())):
                times = np.zeros(num_documents, dtype=np.uint16)
                for lane in range(self._lanes):
                    # An order may have a document twice in one lane.
                    np.add.at(times, order.documents(epoch, lane) - pool.first_document, 1)
                documents = pool.first_document + np.flatnonzero(times != 1)
                self.discrepancies.add_documents(Discrepancy.unplanned, documents, "")


class _LaneSequences:
    """The records of a lane, grouped by sequence as they were written."""

    def __init__(self, records: Records) -> None:
        self.records, numbers = records, records["sequence"]
        inner = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        self.edges = np.array([0, *inner.tolist(), len(numbers)] if len(numbers) else [0], dtype=np.int64)
        """Where groups begin, and where the last one ends. Shape [sequences + 1], the others [sequences]."""
        self.numbers: Integers = numbers[self.edges[:-1]]
        self.pools: Integers = records["pool"][self.edges[:-1]].astype(np.int64)
        """Pool of each sequence, that of its first record."""
        token_ends = np.concatenate([[0], np.cumsum(records["num_tokens"], dtype=np.int64)])
        self._num_tokens = np.diff(token_ends[self.edges])

    def digest(self, digest: int, begin: int, end: int) -> int:
        """Digest of sequences `begin` to `end`, chained to `digest`."""
        for first, stop in pairwise(self.edges[begin : end + 1].tolist()):
            digest = chain(digest, self.records[first:stop])
        return digest

    def counts_agree(self, end: int, state: LaneState) -> bool:
        """Whether the sequences before `end` have as many sequences and tokens by pool as a checkpoint says."""
        pools, num_pools = self.pools[:end], len(state.pools)
        sequences = np.bincount(pools, minlength=num_pools).tolist()
        tokens = np.bincount(pools, weights=self._num_tokens[:end], minlength=num_pools).astype(np.int64).tolist()
        return list(zip(sequences, tokens, strict=True)) == [(own.sequences, own.tokens) for own in state.pools]


def first_sample(ledger: Sequence[Records]) -> int:
    """Number of the first sequence of a ledger in its run."""
    return min(int(own["sequence"][0]) * len(ledger) + lane for lane, own in enumerate(ledger) if len(own))


def _end_sample(ledger: Sequence[Records]) -> int:
    return max(int(own["sequence"][-1]) * len(ledger) + lane for lane, own in enumerate(ledger) if len(own)) + 1


def _check_number(num_sequences: int, num_records: int) -> None:
    """Refuse numbers of sequences that cannot be true, before memory is taken for each: a sequence has a record."""
    if num_sequences > _MOST_MISSING + 16 * num_records:
        what, found = "the ledger and the checkpoints do not belong together", f"{num_records:,} records"
        allowed = f"a record or more for each of {num_sequences:,} sequences, by their numbers"
        hint = "an audit of the run's own folder, whole and as the run left it"
        raise DataError(what, where="the ledger", found=found, allowed=allowed, hint=hint)
