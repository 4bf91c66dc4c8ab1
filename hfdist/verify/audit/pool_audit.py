"""One lane's records of one pool against the order: each document once in an epoch, whole, and in its place.

plan      7 4 9 2 8 ...       the order of the lane's documents in an epoch; the first has position 0
records   7 4 4 9|2 2 8       one record for each piece of a document; `|` a sequence ends

Packing may choose the order of documents inside a window. All else is fixed: which documents an epoch has, that their
pieces leave nothing out and do not overlap, and from which position on documents may still be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import Packing, TooLong
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.verify.audit.discrepancies import Discrepancies, Discrepancy, Integers

Scalar = TypeVar("Scalar", bound=np.generic)

_WINDOW_DOCUMENTS = {Packing.concat: 1, Packing.best_fit: 1024, Packing.none: 64}
"""Documents with tokens whose order packing may choose. The packing code has its own copy: the audit must not share its
mistakes."""


class PoolFindings(NamedTuple):
    """How far a lane has come in a pool, by its records."""

    is_finished: bool
    """Whether the lane has read the last epoch of the pool to its end."""
    agrees_with_place: bool
    """Whether the records end where the checkpoint says; True without a checkpoint."""


class _Epoch(NamedTuple):
    """The records of one epoch, beside the lane's order of it."""

    number: int
    plan: Integers
    """Documents of the lane, in order. Shape [documents]."""
    records: Records
    """Records of documents in the plan. Shape [records]."""
    positions: Integers
    """Position in the plan of each record's document. Shape [records]."""
    settled_after: int
    """Position after which every document must be whole; the document at the position itself need not be."""
    settled_before: int
    """Position before which every document must be whole."""

    @property
    def missing(self) -> Integers:
        """Positions without a record, rising. Shape [missing documents]."""
        return np.flatnonzero(np.bincount(self.positions, minlength=len(self.plan)) == 0)

    def is_settled(self, positions: Integers) -> NDArray[np.bool_]:
        """Whether the document at each of the positions must be there, whole."""
        return (positions > self.settled_after) & (positions < self.settled_before)


@dataclass(frozen=True, kw_only=True)
class PoolAudit:
    """The comparison of one lane's records of one pool with the lane's order."""

    records: Records
    """Records of this lane and pool, in the order in which they were written."""
    plan: LanePlan
    """The run's plan."""
    pool: int
    """Number of the pool."""
    lane: int
    """Number of the lane."""
    place: Place | None
    """Place at which the next sequence begins, by the newest checkpoint; None: the lane is in no checkpoint."""
    begins_inside: bool
    """Whether the records begin in the middle of a run."""
    discrepancies: Discrepancies
    """The list to which the audit adds what is not as planned."""

    def check(self) -> PoolFindings:
        """Compare all epochs, add what is not as planned to `discrepancies`, and say how far the lane has come."""
        self._check_epochs_rise()
        records = self.records[np.argsort(self.records["epoch"], kind="stable")]
        epochs_of_records = records["epoch"].astype(np.int64)
        is_finished, agrees_with_place = self._place_is_end, True
        epochs = self._epochs_to_check()
        for number in epochs:
            begin, end = np.searchsorted(epochs_of_records, [number, number + 1]).tolist()
            epoch = self._open_epoch(
                number, records[begin:end], is_first=number == epochs[0], is_last=number == epochs[-1]
            )
            agrees_with_place &= self._agrees_with_place(epoch)
            if self.place is None and number + 1 == self._epoch_limit:
                is_finished = self._reads_to_end(epoch)
            self._check_documents(epoch)
        return PoolFindings(is_finished, agrees_with_place)

    @property
    def _epoch_limit(self) -> int | None:
        return self.plan.pools[self.pool].epochs

    @property
    def _window(self) -> int:
        return _WINDOW_DOCUMENTS[self.plan.packing]

    @property
    def _place_is_end(self) -> bool:
        """Whether the checkpoint says that the lane has read the last epoch to its end."""
        if self.place is None or self.place.epoch + 1 != self._epoch_limit:
            return False
        return self.place.position == self.plan.orders[self.pool].lane_length(self.place.epoch, self.lane)

    def _check_epochs_rise(self) -> None:
        """No document comes after those of a later epoch; one that is passed over may wait for the next sequence."""
        is_trained = self.records["num_tokens"] > 0
        for records in (self.records[is_trained], self.records[~is_trained]):
            late = records[records["epoch"] < np.maximum.accumulate(records["epoch"])]
            self._add(Discrepancy.misplaced, late["document"], late["sequence"])

    def _epochs_to_check(self) -> list[int]:
        """Give the epochs that have records, or must have some, rising."""
        present = np.unique(self.records["epoch"]).tolist()
        if self.begins_inside and not present:
            return []
        first = present[0] if self.begins_inside else 0
        # Each epoch leaves a record or more, so that a damaged number cannot ask for thousands of epochs.
        last = min(max(present, default=-1), first + len(self.records))
        if self.place is not None:
            last = self.place.epoch
        return sorted({*range(first, last + 1), *present})

    def _open_epoch(self, number: int, records: Records, *, is_first: bool, is_last: bool) -> _Epoch:
        """Find the records in the plan, and add those that it does not have.

        Args:
            number: number of the epoch.
            records: records of this epoch.
            is_first: whether the records of the pool begin in this epoch.
            is_last: whether they end in it.
        """
        plan = self.plan.orders[self.pool].documents(number, self.lane)
        positions = _find_positions(plan, records["document"])
        is_planned = positions >= 0
        self._add_wrong(Discrepancy.misplaced, records, ~is_planned)
        records, positions = records[is_planned], positions[is_planned]
        trained = np.unique(positions[records["num_tokens"] > 0])
        settled_after = self._settled_after(trained, len(plan)) if is_first else -1
        settled_before = self._settled_before(trained, len(plan), number, is_last=is_last)
        return _Epoch(number, plan, records, positions, settled_after, settled_before)

    # Documents at both ends of the records need not be whole. With a window of one document, for example:
    #
    #   plan         7  4  9  2  8  5  3
    #   position     0  1  2  3  4  5  6
    #   records         4  9  2  8          4 may have begun before the first record, 8 may go on after the last
    #   settled           (2  3)            after 1, and before 4; a checkpoint whose place is 5 settles 8, too
    #
    # `trained` are the positions of documents with tokens, rising: only they fill a window.

    def _settled_after(self, trained: Integers, num_documents: int) -> int:
        """Give the position after which all must be whole, in the epoch in which the records begin."""
        if not self.begins_inside:
            return -1
        return int(trained[self._window - 1]) if len(trained) >= self._window else num_documents

    def _settled_before(self, trained: Integers, num_documents: int, number: int, *, is_last: bool) -> int:
        """Give the position before which all must be whole: by the checkpoint, or else by the last records."""
        if self.place is not None:
            if number < self.place.epoch:
                return num_documents
            return self.place.position if number == self.place.epoch else 0
        if not is_last:
            return num_documents
        return int(trained[-self._window]) if len(trained) >= self._window else 0

    def _agrees_with_place(self, epoch: _Epoch) -> bool:
        """Whether the records from the checkpoint's position on are as many as the offset of its place counts."""
        if self.place is None or epoch.number < self.place.epoch:
            return True
        offset = self.place.offset if epoch.number == self.place.epoch else 0
        records = epoch.records[epoch.positions >= epoch.settled_before]
        if self.plan.packing is Packing.concat:
            used = int(records["num_tokens"].sum())
        else:
            used = len(np.unique(records["sequence"][records["num_tokens"] > 0]))
        # No place fits records from its position on that have no token at all.
        has_passed_alone = used == 0 and len(records) > 0
        return used == offset and not has_passed_alone

    def _reads_to_end(self, epoch: _Epoch) -> bool:
        """Whether all documents from `settled_after` on have been read whole."""
        if (epoch.missing > epoch.settled_after).any():
            return False
        records = epoch.records[epoch.positions > epoch.settled_after]
        documents, owner = np.unique(records["document"], return_inverse=True)
        read, wanted = np.zeros(len(documents), dtype=np.int64), np.zeros(len(documents), dtype=np.int64)
        np.add.at(read, owner, records["num_tokens"])
        wanted[owner] = self._tokens_to_read(records["of_tokens"].astype(np.int64))
        return bool((read >= wanted).all())

    def _tokens_to_read(self, of_tokens: Integers) -> Integers:
        """Give how many tokens of each document are to be read, out of `of_tokens`. Shapes [records]."""
        is_cut = self.plan.packing is Packing.none or self.plan.too_long is not TooLong.split
        return np.minimum(of_tokens, self.plan.shape.length) if is_cut else of_tokens

    def _check_documents(self, epoch: _Epoch) -> None:
        """Add documents of an epoch that are missing, out of order, repeated or read in part."""
        missing = epoch.missing
        self._add(Discrepancy.never, epoch.plan[missing[epoch.is_settled(missing)]])
        is_trained = epoch.records["num_tokens"] > 0
        self._check_order(epoch.records[is_trained], epoch.positions[is_trained], self._window)
        self._check_order(epoch.records[~is_trained], epoch.positions[~is_trained], 1)
        self._check_pieces(epoch)

    def _check_order(self, records: Records, positions: Integers, window: int) -> None:
        """Documents come in order; with a window, each less than a window away from its place."""
        if (positions[1:] >= positions[:-1]).all():
            return
        present, firsts = np.unique(positions, return_index=True)
        # Ranks of the positions, in the order in which their documents came: 0 1 2 ... if all is in order.
        came = np.argsort(firsts)
        is_far = np.abs(came - np.arange(len(present))) >= window
        is_wrong = np.zeros(len(records), dtype=bool)
        is_wrong[firsts[came[is_far]]] = True
        self._add_wrong(Discrepancy.misplaced, records, is_wrong)

    def _check_pieces(self, epoch: _Epoch) -> None:
        """Pieces of a document follow each other from its first token to its last.

        document     |---------------------------|      `wanted` tokens of it are to be read
        pieces       [first, stop)[first, stop)         all as they must be
                     [first,      stop)                 then [first < stop of the piece before: again
                     [first, stop)  [first, stop)       first > stop of the piece before, or the last stop < wanted: gap
        """
        by_place = np.lexsort((epoch.records["first_token"], epoch.positions))
        records, positions = epoch.records[by_place], epoch.positions[by_place]
        first, total = records["first_token"].astype(np.int64), records["of_tokens"].astype(np.int64)
        stop = first + records["num_tokens"].astype(np.int64)
        wanted = self._tokens_to_read(total)
        is_passed = stop == first
        # Whether the record before is of the same document, and whether the next one is. Shapes [records].
        follows = np.zeros(len(records), dtype=bool)
        follows[1:] = positions[1:] == positions[:-1]
        has_next = np.zeros(len(records), dtype=bool)
        has_next[:-1] = follows[1:]

        # A document that is passed over has one record, and no tokens.
        overlaps = (first < _previous(stop)) | is_passed | _previous(is_passed)
        is_again = follows & overlaps
        self._add_wrong(Discrepancy.again, records, is_again | (stop > wanted))

        leaves_out = np.where(follows, (first > _previous(stop)) | (total != _previous(total)), first > 0)
        ends_early = ~has_next & (stop < wanted)
        is_gap = (leaves_out | ends_early) & ~is_again
        self._add_wrong(Discrepancy.in_part, records, is_gap & epoch.is_settled(positions))

    def _add_wrong(self, kind: Discrepancy, records: Records, is_wrong: NDArray[np.bool_]) -> None:
        """Add each document with a wrong record once, with the sequence of its first wrong record."""
        wrong = records[is_wrong]
        _, firsts = np.unique(wrong["document"], return_index=True)
        wrong = wrong[np.sort(firsts)]
        self._add(kind, wrong["document"], wrong["sequence"])

    def _add(self, kind: Discrepancy, documents: Integers, sequences: Integers | None = None) -> None:
        self.discrepancies.add_documents(kind, documents, f", lane {self.lane}", sequences)


def _find_positions(plan: Integers, documents: Integers) -> Integers:
    """Find each document's position in the plan; -1: the plan does not have it. Shape of `documents`."""
    if len(plan) == 0:
        return np.full(len(documents), -1)
    by_number = np.argsort(plan)
    # The first document of the sorted plan that is not smaller; past the end if there is none.
    nearest = np.searchsorted(plan, documents, sorter=by_number)
    position = by_number[np.minimum(nearest, len(plan) - 1)]
    return np.where(plan[position] == documents, position, -1)


def _previous(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """Give for each element the one before it, and zero for the first. Shape of `values`."""
    previous = np.zeros_like(values)
    previous[1:] = values[:-1]
    return previous
