"""Documents of one lane and pool against the plan: each once in an epoch, whole, and in its place.

plan      7 4 9 2 8 ...       the lane's order of an epoch
records   7 4 4 9|2 2 8       pieces; `|` a sequence ends

Inside a window of documents packing may choose the order. All else is fixed: which documents an epoch has, that their
pieces leave nothing out and overlap nowhere, and from which place on documents may still be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import Packing, TooLong
from hfdist.data.order.cursor import Place
from hfdist.data.order.records import Records
from hfdist.data.order.shuffle import LaneOrder
from hfdist.verify.audit.findings import Kind, Spots

Integers = NDArray[np.int64]

# The promise of each packing, said here again so that it does not hang on the code that is to keep it.
_WINDOW_DOCUMENTS = {Packing.concat: 1, Packing.best_fit: 1024, Packing.none: 64}
_UNKNOWN = Place(-1, -1, -1)


@dataclass(frozen=True)
class Rules:
    """What is promised of the records of a pool.

    Args:
        packing: of the run.
        too_long: likewise.
        length: of sequences, in tokens.
        epochs: limit of the pool.
        begins_inside: whether the records begin in the middle of a run.
    """

    packing: Packing
    too_long: TooLong
    length: int
    epochs: int | None
    begins_inside: bool

    @property
    def window_documents(self) -> int:
        """Documents with tokens of which packing may choose the order."""
        return _WINDOW_DOCUMENTS[self.packing]


class PoolAudit:
    """Compares the records of one lane and pool with its order.

    Args:
        records: of this lane and pool, in the order in which they were written.
        order: of the pool.
        lane: number of the lane.
        rules: of the pool.
        place: where the next sequence begins, as a checkpoint says; None: where the records end.
    """

    def __init__(self, records: Records, order: LaneOrder, lane: int, rules: Rules, place: Place | None) -> None:
        self._order, self._lane, self._rules = order, lane, rules
        self._place = place or _UNKNOWN
        self._spots = list(_in_falling_epochs(records))
        # One epoch after the other, each in the order of its records.
        self._records = records[np.argsort(records["epoch"], kind="stable")]
        self._epochs = self._records["epoch"].astype(np.int64)
        self.is_finished = self._place.epoch + 1 == rules.epochs and self._place.position == order.lane_length(
            self._place.epoch, lane
        )
        """Whether the pool has come to its end: nothing is left of the last epoch that it may have."""
        self.agrees_with_place = True
        """Whether the records end where `place` says."""

    def check(self) -> list[Spots]:
        """Give what is not as planned."""
        epochs = self._epochs_to_check()
        for epoch in epochs:
            begin, end = np.searchsorted(self._epochs, [epoch, epoch + 1]).tolist()
            own = self._records[begin:end]
            self._check_epoch(epoch, own, is_first=epoch == epochs[0], is_last=epoch == epochs[-1])
        return [spots for spots in self._spots if len(spots.documents)]

    def _epochs_to_check(self) -> list[int]:
        """Those of which there are, or must be, records."""
        present = np.unique(self._epochs).tolist()
        if self._rules.begins_inside and not present:
            return []
        first = present[0] if self._rules.begins_inside else 0
        # Each epoch leaves a record or more: a damaged number cannot ask for thousands.
        last = min(max(present, default=-1), first + len(self._records))
        if self._place is not _UNKNOWN:
            last = self._place.epoch
        return sorted({*range(first, last + 1), *present})

    def _check_epoch(self, epoch: int, records: Records, *, is_first: bool, is_last: bool) -> None:
        plan = self._order.documents(epoch, self._lane)
        positions = _positions(plan, records["document"])
        self._note(Kind.misplaced, records, positions < 0)
        records, positions = records[positions >= 0], positions[positions >= 0]
        is_trained = records["num_tokens"] > 0
        trained = np.flatnonzero(np.bincount(positions[is_trained], minlength=len(plan)))
        window = self._rules.window_documents
        # Up to `low` and from `high` on, documents may be missing or in part.
        low, high = -1, len(plan)
        if is_first and self._rules.begins_inside:
            low = int(trained[window - 1]) if len(trained) >= window else len(plan)
        if is_last and self._place is _UNKNOWN:
            high = int(trained[-window]) if len(trained) >= window else 0
        elif epoch >= self._place.epoch >= 0:
            high = self._place.position if epoch == self._place.epoch else 0
            offset = self._place.offset if epoch == self._place.epoch else 0
            self.agrees_with_place &= self._handed_out(records[positions >= high]) == offset
        missing = np.flatnonzero(np.bincount(positions, minlength=len(plan)) == 0)
        if self._place is _UNKNOWN and epoch + 1 == self._rules.epochs:
            self.is_finished = not (missing > low).any() and self._reads_all(records[positions > low])
        self._spots.append(Spots(Kind.never, plan[missing[(missing > low) & (missing < high)]]))
        self._check_order(records[is_trained], positions[is_trained], window)
        self._check_order(records[~is_trained], positions[~is_trained], 1)
        self._check_pieces(records, positions, low, high)

    def _reads_all(self, records: Records) -> bool:
        """Whether all documents of which there are records are whole."""
        _, owner = np.unique(records["document"], return_inverse=True)
        read, whole = np.zeros((2, int(owner.max(initial=-1)) + 1), dtype=np.int64)
        np.add.at(read, owner, records["num_tokens"])
        whole[owner] = self._whole(records["of_tokens"].astype(np.int64))
        return bool((read >= whole).all())

    def _whole(self, of_tokens: Integers) -> Integers:
        """How many tokens of a document are to be read."""
        is_cut = self._rules.packing is Packing.none or self._rules.too_long is not TooLong.split
        return np.minimum(of_tokens, self._rules.length) if is_cut else of_tokens

    def _handed_out(self, records: Records) -> int:
        """What a place's offset counts, of records behind its position; -1: there may not be any."""
        if self._rules.packing is Packing.concat:
            handed_out = int(records["num_tokens"].sum())
        else:
            handed_out = len(np.unique(records["sequence"][records["num_tokens"] > 0]))
        return handed_out or -min(len(records), 1)

    def _check_order(self, records: Records, positions: Integers, window: int) -> None:
        """Documents come in order; with a window, each less than a window away from its place."""
        if (positions[1:] >= positions[:-1]).all():
            return
        present, firsts = np.unique(positions, return_index=True)
        came = np.argsort(firsts)
        is_off = np.abs(came - np.arange(len(present))) >= window
        is_wrong = np.zeros(len(records), dtype=bool)
        is_wrong[firsts[came[is_off]]] = True
        self._note(Kind.misplaced, records, is_wrong)

    def _check_pieces(self, records: Records, positions: Integers, low: int, high: int) -> None:
        """Pieces of a document follow each other from its first token to its last."""
        order = np.lexsort((records["first_token"], positions))
        records, positions = records[order], positions[order]
        first, num, total = (records[name].astype(np.int64) for name in ("first_token", "num_tokens", "of_tokens"))
        stop = first + num
        whole = self._whole(total)
        goes_on = np.zeros(len(records) + 1, dtype=bool)
        goes_on[1:-1] = positions[1:] == positions[:-1]
        is_next, has_next = goes_on[:-1], goes_on[1:]
        before = np.concatenate([[0], stop[:-1]])
        passed = num == 0
        again = is_next & ((first < before) | passed | np.concatenate([[False], passed[:-1]]))
        self._note(Kind.again, records, again | (stop > whole))
        is_gap = np.where(is_next, (first > before) | (total != np.concatenate([[0], total[:-1]])), first > 0)
        is_gap |= ~has_next & (stop < whole)
        self._note(Kind.in_part, records, is_gap & ~again & (positions > low) & (positions < high))

    def _note(self, kind: Kind, records: Records, is_wrong: NDArray[np.bool_]) -> None:
        """Each document once, where it is wrong first."""
        wrong = records[is_wrong]
        wrong = wrong[np.sort(np.unique(wrong["document"], return_index=True)[1])]
        self._spots.append(Spots(kind, wrong["document"], wrong["sequence"]))


def _in_falling_epochs(records: Records) -> Iterator[Spots]:
    """Documents that come behind those of a later epoch; what is passed over may wait for the next sequence."""
    is_trained = records["num_tokens"] > 0
    for own in (np.flatnonzero(is_trained), np.flatnonzero(~is_trained)):
        epochs = records["epoch"][own]
        late = records[own[epochs < np.maximum.accumulate(epochs)]]
        yield Spots(Kind.misplaced, late["document"], late["sequence"])


def _positions(plan: Integers, documents: Integers) -> Integers:
    """Where documents stand in the plan; -1: nowhere."""
    if len(plan) == 0:
        return np.full(len(documents), -1)
    by_number = np.argsort(plan)
    place = np.searchsorted(plan, documents, sorter=by_number)
    position = by_number[np.minimum(place, len(plan) - 1)]
    return np.where(plan[position] == documents, position, -1)
