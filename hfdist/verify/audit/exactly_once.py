"""The proof that a run read every document as often as planned: its ledger against the arithmetic of its order.

Sequences are numbered without a gap, each is of the source whose turn it was, its documents are those of the order, and
checkpoints have digested the same records.

sample     0  1  2  3  4  5  6  7       number of a sequence in the run; with 3 lanes, for example:
lane       0  1  2  0  1  2  0  1       sample % lanes
number     0  0  0  1  1  1  2  2       sample // lanes: number of the sequence within its lane
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.records import Records
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.errors import DataError
from hfdist.processes.startup import counted, reporting
from hfdist.verify.audit.discrepancies import Discrepancies, Discrepancy, Integers
from hfdist.verify.audit.lane_audit import LaneAudits
from hfdist.verify.audit.ledger_sums import LedgerSums

_NO_POOL = -1
"""The pool of a sequence without records."""
_MOST_MISSING = 2**20
"""Sequences that may be without a record, in a ledger of few records; see `_check_number`."""
_MOST_SEQUENCES_OF_RECORD = 16
"""Sequences that may be missing besides, for each record."""


class Audit:
    """The comparison of a ledger with the plan: one pass over the lanes, then one over what all lanes share.

    Args:
        ledger: the records of all lanes.
        corpus: the corpus that the run read.
        plan: the run's plan; only its orders, its mixture and its settings are used.
        cursors: the cursors of the run's checkpoints, with their steps; with islands those of all their runs.
        identity: the identity of the run's data as they are now.
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
        _check_identity(self._cursors, identity)
        self._ledger, self._corpus, self._plan = ledger, corpus, plan
        self._lanes = len(ledger)
        self.discrepancies, self.totals = Discrepancies(corpus), LedgerSums(corpus)
        # An island that has a parameter server knows its own lanes only.
        self._newest = {lane: cursor.lanes[lane] for _, cursor in self._cursors for lane in cursor.lanes}
        self.first_sample = begin // global_batch_size * global_batch_size
        """Number of the first sequence that is audited, the first of its step; not 0: the run began from another run's
        checkpoint. As a run begins with a whole step, a sequence of this step without records is missing."""
        end = _end_sample(ledger)
        self._ends = [self._end_of_lane(lane, end, takes_turns=takes_turns) for lane in range(self._lanes)]
        """Sequences of each lane up to the end of what is audited."""
        begins = [self._before(self.first_sample, lane) for lane in range(self._lanes)]
        self.num_sequences = sum(max(stop - start, 0) for start, stop in zip(begins, self._ends, strict=True))
        last = max((number - 1) * self._lanes + lane for lane, number in enumerate(self._ends))
        # An island has the records of its own lanes alone, and the numbers of all.
        with_records = sum(len(records) > 0 for records in ledger)
        _check_number(last + 1 - self.first_sample, sum(map(len, ledger)) * self._lanes // with_records)
        self._num_turns = max(last + 1 - self.first_sample, 0)

    def check(self, processes: int = 1) -> Audit:
        """Compare everything; gives this audit, with what was found.

        Args:
            processes: number of processes among which the lanes are dealt; 1: this one does all.

        Raises:
            ResourceError: one of the processes has died.
        """
        turns = np.full(self._num_turns, _NO_POOL)
        with reporting("comparing the ledger with the plan"):
            finished = self._check_lanes(turns, processes)
            self._check_turns(turns, finished)
            self._check_plan()
        return self

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.discrepancies.counts

    def _check_lanes(self, turns: Integers, processes: int) -> dict[int, list[int]]:
        """Check each lane, and write the pools of its sequences into `turns`; gives the pools that it has finished."""
        audits = LaneAudits(
            ledger=self._ledger,
            corpus=self._corpus,
            plan=self._plan,
            cursors=self._cursors,
            newest=self._newest,
            ends=self._ends,
            begins_inside=self.first_sample > 0,
        )
        finished = {}
        for lane, found in enumerate(counted(audits.check(processes), self._lanes, "lanes")):
            for kind, count in found.counts.items():
                self.discrepancies.add(kind, found.names[kind], count)
            samples = found.numbers * self._lanes + lane - self.first_sample
            turns[samples[samples >= 0]] = found.pools[samples >= 0]
            self.totals.join(found.totals)
            finished[lane] = found.finished
        return finished

    def _end_of_lane(self, lane: int, end_sample: int, *, takes_turns: bool) -> int:
        """Give the number of a lane's sequences before the end of what is audited; `end_sample`: end of the ledger."""
        if lane in self._newest:
            return self._newest[lane].sequences
        if takes_turns:
            return self._before(end_sample, lane)
        records = self._ledger[lane]
        return int(records["sequence"][-1]) + 1 if len(records) else 0

    def _before(self, samples: int, lane: int) -> int:
        """Give how many of the first `samples` sequences of a run are a lane's, if lanes take turns."""
        return (samples - lane + self._lanes - 1) // self._lanes

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
        """Give the samples that have another pool than the mixture picks, rising."""
        lanes, num_pools = self._lanes, len(self._plan.pools)
        last_samples = {
            (lane, pool): self._last_sample(turns, lane, pool) for lane in range(lanes) for pool in finished[lane]
        }
        if num_pools == 1 and not last_samples:
            # One pool that no lane has finished is picked each time: no need to ask the mixture for millions.
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
        """Give the sample of the lane's last sequence of a pool; -1: the lane has none."""
        first = (lane - self.first_sample) % self._lanes
        numbers = np.flatnonzero(turns[first :: self._lanes] == pool)
        return self.first_sample + first + int(numbers[-1]) * self._lanes if len(numbers) else -1

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


def _check_identity(cursors: Iterable[tuple[int, Cursor]], identity: str) -> None:
    for step, cursor in cursors:
        if cursor.identity != identity:
            raise DataError(
                "the data, the tokenizer or data.* have changed since the run",
                where=f"the checkpoint of step {step}",
                found=identity,
                allowed=cursor.identity,
                hint="an audit needs the data as the run read them",
            )


def first_sample(ledger: Sequence[Records]) -> int:
    """Give the sample of the first sequence of a ledger that has a record; `ledger` has the records of each lane."""
    return min(int(records["sequence"][0]) * len(ledger) + lane for lane, records in enumerate(ledger) if len(records))


def _end_sample(ledger: Sequence[Records]) -> int:
    """Give the sample after the last one that has a record."""
    last = (int(records["sequence"][-1]) * len(ledger) + lane for lane, records in enumerate(ledger) if len(records))
    return max(last) + 1


def _check_number(num_sequences: int, num_records: int) -> None:
    """Refuse numbers of sequences that cannot be true, before memory is taken for each: a sequence has a record."""
    if num_sequences > _MOST_MISSING + _MOST_SEQUENCES_OF_RECORD * num_records:
        what, found = "the ledger and the checkpoints do not belong together", f"{num_records:,} records"
        allowed = f"a record or more for each of {num_sequences:,} sequences, by their numbers"
        hint = "an audit of the run's own folder, whole and as the run left it"
        raise DataError(what, where="the ledger", found=found, allowed=allowed, hint=hint)
