"""The proof that a run has read every document as often as planned: its ledger against the arithmetic of its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.records import Records, Status
from hfdist.data.stream.lane import Plan
from hfdist.errors import DataError
from hfdist.verify.audit.documents import PoolAudit, Rules
from hfdist.verify.audit.findings import Findings, Kind, Spots
from hfdist.verify.audit.ledger import end_sample, first_sample
from hfdist.verify.audit.sequences import (
    NO_POOL,
    Groups,
    Turns,
    check_cursors,
    check_numbering,
    check_turns,
    num_in_lane,
)
from hfdist.verify.audit.totals import Totals


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What a ledger holds, and what is wrong with it."""

    findings: Findings
    totals: Totals
    first_sample: int
    """Not 0: the run began from another run's checkpoint."""
    samples: int
    """Sequences of the run up to the end of what was audited."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings.counts


def audit(
    ledger: Sequence[Records],
    corpus: Corpus,
    plan: Plan,
    cursors: Mapping[int, Cursor],
    *,
    identity: str,
    global_batch_size: int,
) -> Audited:
    """Compare a ledger with the plan.

    Args:
        ledger: records of all lanes.
        corpus: that the run read.
        plan: of the run; only its orders, its mixture and its settings are used.
        cursors: of the run's checkpoints, by their steps.
        identity: of the run's data as they are now.
        global_batch_size: sequences in a step.

    Raises:
        DataError: the data, the tokenizer or data.* have changed since.
    """
    begin = first_sample(ledger)
    # Those before are of what was read before it.
    cursors = {step: cursor for step, cursor in sorted(cursors.items()) if cursor.samples > begin}
    for step, cursor in cursors.items():
        if cursor.identity != identity:
            raise DataError(
                "the data, the tokenizer or data.* have changed since the run",
                where=f"the checkpoint of step {step}",
                found=identity,
                allowed=cursor.identity,
                hint="an audit needs the data as the run read them",
            )
    return _Audit(ledger, corpus, plan, cursors, global_batch_size).run()


class _Audit:
    """One pass over the lanes, then over what all of them must have in common."""

    def __init__(
        self, ledger: Sequence[Records], corpus: Corpus, plan: Plan, cursors: Mapping[int, Cursor], batch: int
    ) -> None:
        self._ledger, self._corpus, self._plan, self._cursors = ledger, corpus, plan, cursors
        self._lanes = len(ledger)
        self._findings, self._totals = Findings(corpus), Totals(corpus)
        self._newest = cursors[max(cursors)] if cursors else None
        # A run begins at a step: what is missing behind its beginning is missing.
        self._first_sample = first_sample(ledger) // batch * batch
        self._samples = self._newest.samples if self._newest is not None else end_sample(ledger)

    def run(self) -> Audited:
        turns = np.full(max(self._samples - self._first_sample, 0), NO_POOL)
        finished = {lane: self._check_lane(lane, turns) for lane in range(self._lanes)}
        check_turns(
            Turns(self._first_sample, turns, finished),
            self._plan.mixture,
            lanes=self._lanes,
            num_pools=len(self._plan.pools),
            findings=self._findings,
        )
        self._check_plan()
        return Audited(
            findings=self._findings, totals=self._totals, first_sample=self._first_sample, samples=self._samples
        )

    def _check_lane(self, lane: int, turns: NDArray[np.int64]) -> frozenset[int]:
        """Check one lane, and fill in its turns; gives the pools that it has finished."""
        records = self._ledger[lane]
        # What no checkpoint counts was written just before a kill, and would be cut off by the next start.
        records = records[records["sequence"] < num_in_lane(self._samples, lane, self._lanes)]
        records = self._readable(records, lane)
        groups = Groups(records)
        check_numbering(groups, lane, self._findings)
        begins_inside = self._first_sample > 0
        check_cursors(groups, lane, self._cursors, self._findings, begins_inside=begins_inside)
        samples = groups.numbers * self._lanes + lane - self._first_sample
        is_inside = samples >= 0
        turns[samples[is_inside]] = groups.pools[is_inside]
        self._totals.add(records)
        return frozenset(pool for pool in range(len(self._plan.pools)) if self._check_pool(records, lane, pool))

    def _readable(self, records: Records, lane: int) -> Records:
        """Without those that no run writes."""
        ends = records["first_token"].astype(np.int64) + records["num_tokens"]
        gives_tokens = np.isin(records["fate"], [Status.trained, Status.quarantined])
        is_good = (records["first_token"] >= 0) & (records["num_tokens"] >= 0) & (ends <= records["of_tokens"])
        is_good &= (records["num_tokens"] > 0) == gives_tokens
        is_good &= (
            (records["pool"] < len(self._plan.pools)) & (records["fate"] <= max(Status)) & (records["sequence"] >= 0)
        )
        is_good &= (records["document"] >= 0) & (records["document"] < self._corpus.num_documents)
        bad = records[~is_good]
        self._findings.add_documents(Spots(Kind.unreadable, bad["document"], bad["sequence"]), lane)
        return records[is_good]

    def _check_pool(self, records: Records, lane: int, pool: int) -> bool:
        plan = self._plan
        rules = Rules(plan.packing, plan.too_long, plan.shape.length, plan.pools[pool].epochs, self._first_sample > 0)
        place = None if self._newest is None else self._newest.lanes[lane].pools[pool].place
        check = PoolAudit(records[records["pool"] == pool], plan.orders[pool], lane, rules, place)
        for spots in check.check():
            self._findings.add_documents(spots, lane)
        if not check.agrees_with_place:
            name = f"lane {lane}, {plan.pools[pool].name}: the records do not end at {tuple(place or ())}"
            self._findings.add(Kind.cursor, [name], 1)
        return check.is_finished

    def _check_plan(self) -> None:
        """All lanes together have each document of a pool once in an epoch."""
        for number, (pool, order) in enumerate(zip(self._plan.pools, self._plan.orders, strict=True)):
            num_documents = sum(sum(shard.runs) for shard in pool.shards)
            for epoch in self._totals.epochs(number):
                times = np.zeros(num_documents, dtype=np.uint8)
                for lane in range(self._lanes):
                    times[order.documents(epoch, lane) - pool.first_document] += 1
                self._findings.add_documents(Spots(Kind.unplanned, pool.first_document + np.flatnonzero(times != 1)))
