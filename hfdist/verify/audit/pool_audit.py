"""One lane's records of one pool against the order: each document once in an epoch, whole, and in its place.

plan      7 4 9 2 8 ...       a lane's order of an epoch
records   7 4 4 9|2 2 8       pieces; `|` a sequence ends

Packing may choose the order of documents inside a window. All else is fixed: which documents an epoch has, that their
pieces leave nothing out and do not overlap, and from which place on documents may still be missing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import Packing, TooLong
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.verify.audit.discrepancies import Discrepancies, Discrepancy, Integers

# Documents with tokens whose order packing may choose. Stated here again, to be independent of the packing code.
_WINDOW_DOCUMENTS = {Packing.concat: 1, Packing.best_fit: 1024, Packing.none: 64}


class PoolAudit:
    """Compares the records of one lane and pool with the order: each document once in an epoch, whole, in its place.

    Args:
        records: the records of this lane and pool, in the order in which they were written.
        plan: the run's plan.
        pool: number of the pool.
        lane: number of the lane.
        place: where the next sequence begins, as a checkpoint says; None: where the records end.
        begins_inside: whether the records begin in the middle of a run.
    """

    def __init__(
        self, records: Records, plan: LanePlan, pool: int, lane: int, place: Place | None, *, begins_inside: bool
    ) -> None:
        self._order, self._epoch_limit, self._lane = plan.orders[pool], plan.pools[pool].epochs, lane
        self._plan, self._begins_inside = plan, begins_inside
        self._place, self._written = place, records
        # One epoch after the other, each in the order of its records.
        self._records = records[np.argsort(records["epoch"], kind="stable")]
        self._epochs = self._records["epoch"].astype(np.int64)
        self.is_finished = (
            place is not None
            and place.epoch + 1 == self._epoch_limit
            and place.position == self._order.lane_length(place.epoch, lane)
        )
        """Whether the lane has read the last epoch of the pool to its end."""
        self.agrees_with_place = True
        """Whether the records end where `place` says."""

    def check(self, discrepancies: Discrepancies) -> None:
        """Add what is not as planned."""
        self._discrepancies = discrepancies
        self._check_epochs_rise()
        epochs = self._epochs_to_check()
        for epoch in epochs:
            begin, end = np.searchsorted(self._epochs, [epoch, epoch + 1]).tolist()
            self._check_epoch(epoch, self._records[begin:end], is_first=epoch == epochs[0], is_last=epoch == epochs[-1])

    def _check_epochs_rise(self) -> None:
        """No document comes after those of a later epoch; one that is passed over may wait for the next sequence."""
        is_trained = self._written["num_tokens"] > 0
        for records in (self._written[is_trained], self._written[~is_trained]):
            late = records[records["epoch"] < np.maximum.accumulate(records["epoch"])]
            self._add(Discrepancy.misplaced, late["document"], late["sequence"])

    def _epochs_to_check(self) -> list[int]:
        """Epochs that have records, or must have some."""
        present = np.unique(self._epochs).tolist()
        if self._begins_inside and not present:
            return []
        first = present[0] if self._begins_inside else 0
        # Each epoch leaves a record or more, so that a damaged number cannot ask for thousands.
        last = min(max(present, default=-1), first + len(self._records))
        if self._place is not None:
            last = self._place.epoch
        return sorted({*range(first, last + 1), *present})

    def _check_epoch(self, epoch: int, records: Records, *, is_first: bool, is_last: bool) -> None:
        plan = self._order.documents(epoch, self._lane)
        positions = _positions(plan, records["document"])
        self._note(Discrepancy.misplaced, records, positions < 0)
        records, positions = records[positions >= 0], positions[positions >= 0]
        is_trained = records["num_tokens"] > 0
        trained = np.flatnonzero(np.bincount(positions[is_trained], minlength=len(plan)))
        low, high = self._settled_range(epoch, len(plan), trained, is_first=is_first, is_last=is_last)
        if self._place is not None and epoch >= self._place.epoch:
            offset = self._place.offset if epoch == self._place.epoch else 0
            self.agrees_with_place &= self._num_used(records[positions >= high]) == offset
        missing = np.flatnonzero(np.bincount(positions, minlength=len(plan)) == 0)
        if self._place is None and epoch + 1 == self._epoch_limit:
            self.is_finished = not (missing > low).any() and self._reads_all(records[positions > low])
        self._add(Discrepancy.never, plan[missing[(missing > low) & (missing < high)]])
        self._check_order(records[is_trained], positions[is_trained], self._window)
        self._check_order(records[~is_trained], positions[~is_trained], 1)
        self._check_pieces(records, positions, low, high)

    @property
    def _window(self) -> int:
        return _WINDOW_DOCUMENTS[self._plan.packing]

    def _settled_range(
        self, epoch: int, num_documents: int, trained: Integers, *, is_first: bool, is_last: bool
    ) -> tuple[int, int]:
        """Give `low` and `high`: documents between these positions must be there, whole.

        `trained` are the positions of documents with tokens. The records begin in the first epoch, and end in the last.
        """
        low, high, has_window = -1, num_documents, len(trained) >= self._window
        if is_first and self._begins_inside:
            low = int(trained[self._window - 1]) if has_window else num_documents
        if self._place is None:
            if is_last:
                high = int(trained[-self._window]) if has_window else 0
        elif epoch >= self._place.epoch:
            high = self._place.position if epoch == self._place.epoch else 0
        return low, high

    def _reads_all(self, records: Records) -> bool:
        """Whether all documents of which there are records are whole."""
        _, owner = np.unique(records["document"], return_inverse=True)
        read, wanted = np.zeros((2, int(owner.max(initial=-1)) + 1), dtype=np.int64)
        np.add.at(read, owner, records["num_tokens"])
        wanted[owner] = self._tokens_to_read(records["of_tokens"].astype(np.int64))
        return bool((read >= wanted).all())

    def _tokens_to_read(self, of_tokens: Integers) -> Integers:
        """How many tokens of documents are to be read."""
        is_cut = self._plan.packing is Packing.none or self._plan.too_long is not TooLong.split
        return np.minimum(of_tokens, self._plan.shape.length) if is_cut else of_tokens

    def _num_used(self, records: Records) -> int:
        """What a place's offset counts, of records after its position; -1: there may not be any."""
        if self._plan.packing is Packing.concat:
            used = int(records["num_tokens"].sum())
        else:
            used = len(np.unique(records["sequence"][records["num_tokens"] > 0]))
        return used or -min(len(records), 1)

    def _check_order(self, records: Records, positions: Integers, window: int) -> None:
        """Documents come in order; with a window, each less than a window away from its place."""
        if (positions[1:] >= positions[:-1]).all():
            return
        present, firsts = np.unique(positions, return_index=True)
        came = np.argsort(firsts)
        is_off = np.abs(came - np.arange(len(present))) >= window
        is_wrong = np.zeros(len(records), dtype=bool)
        is_wrong[firsts[came[is_off]]] = True
        self._note(Discrepancy.misplaced, records, is_wrong)

    def _check_pieces(self, records: Records, positions: Integers, low: int, high: int) -> None:
        """Pieces of a document follow each other from its first token to its last."""
        order = np.lexsort((records["first_token"], positions))
        records, positions = records[order], positions[order]
        first, num, total = (records[name].astype(np.int64) for name in ("first_token", "num_tokens", "of_tokens"))
        stop = first + num
        wanted = self._tokens_to_read(total)
        continues = np.zeros(len(records) + 1, dtype=bool)
        continues[1:-1] = positions[1:] == positions[:-1]
        is_next, has_next = continues[:-1], continues[1:]
        before = np.concatenate([[0], stop[:-1]])
        passed = num == 0
        again = is_next & ((first < before) | passed | np.concatenate([[False], passed[:-1]]))
        self._note(Discrepancy.again, records, again | (stop > wanted))
        is_gap = np.where(is_next, (first > before) | (total != np.concatenate([[0], total[:-1]])), first > 0)
        is_gap |= ~has_next & (stop < wanted)
        self._note(Discrepancy.in_part, records, is_gap & ~again & (positions > low) & (positions < high))

    def _note(self, kind: Discrepancy, records: Records, is_wrong: NDArray[np.bool_]) -> None:
        """Add each document once, where it is wrong first."""
        wrong = records[is_wrong]
        wrong = wrong[np.sort(np.unique(wrong["document"], return_index=True)[1])]
        self._add(kind, wrong["document"], wrong["sequence"])

    def _add(self, kind: Discrepancy, documents: Integers, sequences: Integers | None = None) -> None:
        self._discrepancies.add_documents(kind, documents, f", lane {self._lane}", sequences)


def _positions(plan: Integers, documents: Integers) -> Integers:
    """Where documents stand in the plan; -1: nowhere."""
    if len(plan) == 0:
        return np.full(len(documents), -1)
    by_number = np.argsort(plan)
    place = np.searchsorted(plan, documents, sorter=by_number)
    position = by_number[np.minimum(place, len(plan) - 1)]
    return np.where(plan[position] == documents, position, -1)
