"""The position of the stream of a data rank: the lanes that it reads, how far each one is, and which one is next.

data ranks     0  1  0  1  0  1     the lanes of a run take turns, and so do its data ranks
lanes          0  1  2  3  4  5     rank 1 reads 1, 3 and 5; `_turn` is a place in that list
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.lane_state import Columns, LaneState, Progress
from hfdist.data.order.records import chain
from hfdist.data.order.shares import Shares
from hfdist.data.stream.lane import LaneSequence
from hfdist.data.stream.lane_plan import LanePlan
from hfdist.data.stream.ledger import Ledger
from hfdist.data.stream.many_lanes import SequencesInTurn
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)


class Reader(NamedTuple):
    """The reader of a stream: one data rank of one of the runs that share the lanes."""

    data_rank: int
    data_size: int
    """Number of data ranks of the run."""
    run: int
    num_runs: int
    """Number of runs that share the lanes."""


class _Dealt(NamedTuple):
    """The lanes that a reader reads from a cursor on."""

    shares: Shares | None
    """Which run reads which lanes; None: there is one run."""
    lanes_of_run: list[int]
    lanes_of_rank: list[int]


class StreamPosition:
    """The position of one data rank; it and its ledger move on with each sequence that the stream gives.

    Args:
        corpus: the documents.
        plan: the plan that all lanes share.
        identity: digest of all that decides which token stands where; a cursor with another one is refused.
        num_lanes: the number of lanes of all runs and ranks together.
        reader: the data rank and the run that this position is of.
        global_batch_size: sequences in a step of all runs together; None: it is not known.
    """

    def __init__(
        self,
        corpus: Corpus,
        plan: LanePlan,
        identity: str,
        *,
        num_lanes: int,
        reader: Reader,
        global_batch_size: int | None,
    ) -> None:
        self.corpus, self.plan, self.identity = corpus, plan, identity
        self.ledger: Ledger | None = None
        """The record of all sequences given, if there is one."""
        self.may_begin_anew = False
        """Whether to accept a cursor of other data, and read these from their beginning."""
        self.num_deals = 0
        """How many times this rank was dealt other lanes, or jumped to another place in its lanes."""
        self._num_lanes, self._reader, self._global_batch_size = num_lanes, reader, global_batch_size
        self._stand_at(self._beginning(0))

    def _beginning(self, samples: int) -> Cursor:
        """Make the cursor of the beginning of all lanes, in a run that has read `samples` sequences of other data."""
        start = LaneState(digest=0, pools=(Progress(),) * len(self.corpus.pools), sequences=samples // self._num_lanes)
        return Cursor(
            identity=self.identity,
            contents=self.corpus.inventory.digest,
            num_lanes=self._num_lanes,
            samples=samples,
            lanes=dict.fromkeys(range(self._num_lanes), start),
            next_lane=0,
        )

    def _stand_at(self, cursor: Cursor) -> None:
        """Take the lanes that the cursor gives to this rank, and go on where they stand."""
        self.shares, self.lanes_of_run, self.lanes = self._dealt_at(cursor)
        self._states = {lane: cursor.lanes[lane] for lane in self.lanes}
        """How far each lane of this rank has come."""
        self._of_other_runs = {}
        """How far each lane of another run had come at this cursor."""
        if self._reader.num_runs > 1:
            own = set(self.lanes_of_run)
            self._of_other_runs = {lane: state for lane, state in cursor.lanes.items() if lane not in own}
        self._samples = cursor.samples
        """Sequences that the whole run has read."""
        self._turn = _next_turn(cursor, self.lanes_of_run) // self._reader.data_size
        """The place in `lanes` of the lane that gives this rank's next sequence."""
        self._in_turn: SequencesInTurn | None = None
        """The source of batches that are taken in columns; `_states` lags after it until `_catch_up`."""

    def _dealt_at(self, cursor: Cursor) -> _Dealt:
        """Find the lanes that this reader reads from a cursor on.

        CheckpointError: the data ranks of this run cannot share its lanes evenly.
        """
        data_rank, data_size, run, num_runs = self._reader
        shares = None
        lanes_of_run = list(range(cursor.num_lanes))
        if num_runs > 1:
            shares = cursor.shares
            if shares is None or shares.count != num_runs:
                shares = Shares.at_home(cursor.num_lanes, num_runs)
            lanes_of_run = shares.lanes_of(run)
        if len(lanes_of_run) % data_size != 0:
            what = "the data ranks cannot share the lanes that this run reads evenly"
            found = f"{len(lanes_of_run)} lanes for {data_size} data ranks"
            raise CheckpointError(what, where="cursor.shares", found=found, hint="the layout of the checkpoint")
        return _Dealt(shares, lanes_of_run, lanes_of_run[data_rank::data_size])

    def at_beginning(self) -> Self:
        """Give a copy of this stream that stands at the beginning of the data, and writes no ledger."""
        other = copy.copy(self)
        other.ledger = None
        other._stand_at(self._beginning(0))
        return other

    def ahead(self) -> Self:
        """Give a copy of this stream that stands at the same place, moves on by itself, and writes no ledger."""
        self._catch_up()
        other = copy.copy(self)
        other.ledger, other._states, other._in_turn = None, dict(self._states), None
        return other

    @property
    def num_samples(self) -> int:
        """Number of sequences that all runs have read together, if all are as far as this one."""
        return self._samples

    @property
    def has_ended(self) -> bool:
        """Whether all lanes of this rank have given their last sequence."""
        return all(
            self.plan.is_finished(pool, lane, progress.place)
            for lane, state in self._states.items()
            for pool, progress in enumerate(state.pools)
        )

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor of this rank's lanes as a value for JSON."""
        return self.cursor().to_json()

    def cursor(self) -> Cursor:
        """Give the cursor of this rank's lanes, after the sequences that were given; those read ahead do not count.

        If several runs share the lanes, the lanes of the other runs are in it, too, as they stood at the last `deal`.
        """
        self._catch_up()
        return Cursor(
            identity=self.identity,
            contents=self.corpus.inventory.digest,
            num_lanes=self._num_lanes,
            samples=self._samples,
            lanes=self._states | self._of_other_runs,
            # A run to which no lane was dealt has no next lane; any stands for it until it is dealt some.
            next_lane=self.lanes_of_run[self._turn * self._reader.data_size] if self.lanes_of_run else 0,
            shares=self.shares,
        )

    def load_state_dict(
        self, state: Mapping[str, object], columns: Columns | None = None, *, ledger: Path | None = None
    ) -> None:
        """Resume at the cursor of this rank, or at one that was merged from any number of ranks.

        Args:
            state: a value of `state_dict`, or with `columns` the first value of `Cursor.to_columns`.
            columns: the places of the lanes, the second value of `Cursor.to_columns`; None: `state` has them.
            ledger: the ledger folder of the cursor's run, which says what its files held; None: this stream's own
                folder, if it has one.

        Raises:
            CheckpointError: the cursor is of other data, another tokenizer or other settings.
        """
        cursor = Cursor.from_json(state, columns)
        self._check_identity(cursor, ledger)
        if cursor.identity != self.identity:
            self._begin_anew(cursor)
            return
        if cursor.num_lanes != self._num_lanes:
            # The number of lanes is part of the identity, which is the same: only damage can have changed it.
            what, found = "the data cursor is damaged", cursor.num_lanes
            raise CheckpointError(what, where="cursor.lanes", found=found, allowed=str(self._num_lanes))
        self.corpus.inventory.check(cursor.contents, self._ledger_folder(ledger), may_change=self.may_begin_anew)
        _, lanes_of_run, lanes_of_rank = self._dealt_at(cursor)
        if _next_turn(cursor, lanes_of_run) % self._reader.data_size != 0:
            raise CheckpointError("the cursor stands inside a global batch", where="cursor", found=cursor.samples)
        for lane in lanes_of_rank:
            self._check_lane(lane, cursor.lanes.get(lane))
        self._stand_at(cursor)
        # Where runs share the lanes, how much of the ledger counts is known only once they have agreed on it.
        if self.shares is None:
            self.truncate_ledger()

    def check_identity(
        self, state: Mapping[str, object], columns: Columns | None = None, *, ledger: Path | None = None
    ) -> None:
        """Refuse the cursor of other data, unless these may be read from their beginning. Changes nothing.

        Arguments and errors are those of `load_state_dict`.
        """
        self._check_identity(Cursor.from_json(state, columns), ledger)

    def _check_identity(self, cursor: Cursor, ledger: Path | None) -> None:
        if cursor.identity == self.identity or self.may_begin_anew:
            return
        changes = self.corpus.inventory.changes_since(cursor.contents, self._ledger_folder(ledger))
        if changes:
            raise CheckpointError(
                "files have changed since this checkpoint",
                where="; ".join(changes),
                hint="put the old ones back, or checkpoint.allow_changes=true to begin the new data",
            )
        raise CheckpointError(
            "the data, the tokenizer, data.* or the rules of packing have changed since this checkpoint",
            where="cursor.identity",
            found=self.identity,
            allowed=cursor.identity,
            hint="the same data.* and hfdist, or checkpoint.allow_changes=true to begin the new data",
        )

    def _check_lane(self, lane: int, state: LaneState | None) -> None:
        """Raise a CheckpointError if a lane's places are not in its pools."""
        places = [] if state is None else [progress.place for progress in state.pools]
        fits = len(places) == len(self.plan.orders)
        for place, order in zip(places, self.plan.orders, strict=False):
            length = order.lane_length(place.epoch, lane)
            # After the last document of an epoch there is no token to stand at.
            is_at_end = place.position == length and place.offset == 0
            fits = fits and (place.position < length or is_at_end)
        if not fits:
            where = f"cursor.places, lane {lane}"
            raise CheckpointError("the data cursor is damaged", where=where, found=places or "no place")

    def _begin_anew(self, before: Cursor) -> None:
        """Read the new data from their beginning, and count on from where a step and a round of lanes begin."""
        logger.warning("the data, the tokenizer or data.* have changed since the checkpoint: they are read anew")
        unit = math.lcm(self._num_lanes, self._global_batch_size or 1)
        num_units = -(-before.samples // unit)
        self._stand_at(self._beginning(num_units * unit))
        if self.ledger is not None:
            self.ledger.set_aside(self.lanes, before.samples)

    def deal(self, cursor: Cursor) -> None:
        """Read from here on the lanes that the cursor's shares give to this run.

        Args:
            cursor: the places of all lanes, with the shares that hold from here on.
        """
        self._catch_up()
        lanes_before, in_turn = self.lanes_of_run, self._in_turn
        self._stand_at(cursor)
        if self.lanes_of_run == lanes_before:
            # The same lanes at the same places: the batches that were cut of them already are the next ones.
            self._in_turn = in_turn
        else:
            self._turn = 0
            self.num_deals += 1

    def go_on_as(self, cursor: Cursor) -> None:
        """Go on at the place of another run; what this one has read since its last exchange does not count.

        Args:
            cursor: the other run's cursor, with all lanes, and with the shares that hold from here on.
        """
        self._stand_at(cursor)
        self._turn = 0
        self.num_deals += 1
        if self.ledger is not None:
            self.ledger.go_back({lane: self._counted(lane) for lane in range(self._num_lanes)})

    def truncate_ledger(self) -> None:
        """Truncate the ledger to where this stream stands: a run that was killed has written more."""
        if self.ledger is not None:
            others = {lane: self._counted(lane) for lane in self._of_other_runs}
            self.ledger.go_back(others | {lane: state.sequences for lane, state in self._states.items()})

    def _counted(self, lane: int) -> int:
        """Give the number of sequences of a lane up to which the records of this run count."""
        if self.shares is None:
            raise ValueError("only runs that share lanes have agreed on what counts")
        return self.shares.end_of(lane, self._reader.run)

    def _ledger_folder(self, given: Path | None) -> Path | None:
        """Give the ledger folder that was given, or else this stream's own; None: there is none."""
        if given is None and self.ledger is not None:
            return self.ledger.folder
        return given

    def lanes_of_worker(self, worker: int, num_workers: int) -> list[int]:
        """Give the lanes that a worker reads from here on, in the order of their turns."""
        first = self._turn + worker
        return [self.lanes[turn % len(self.lanes)] for turn in range(first, first + len(self.lanes), num_workers)]

    def _states_of_worker(self, worker: int, num_workers: int) -> dict[int, LaneState]:
        """Give how far each lane of a worker has come, in the order of their turns."""
        self._catch_up()
        return {lane: self._states[lane] for lane in self.lanes_of_worker(worker, num_workers)}

    def _go_past(self, given: LaneSequence) -> None:
        """Advance the state of a lane, and the ledger, past a sequence that it has given."""
        lane, pool, sequence = given
        state = self._states[lane]
        if pool is None:
            self._states[lane] = state._replace(sequences=state.sequences + 1)
            return
        records = sequence.records
        records["sequence"] = state.sequences
        before = state.pools[pool]
        after = Progress(
            sequence.next_place,
            before.sequences + 1,
            before.tokens + sequence.num_tokens,
            before.documents + sequence.num_documents,
        )
        pools = (*state.pools[:pool], after, *state.pools[pool + 1 :])
        self._states[lane] = LaneState(chain(state.digest, records), pools, state.sequences + 1)
        if self.ledger is not None:
            self.ledger.add(lane, records, sequence.problems)

    def _catch_up(self) -> None:
        """Advance the states of lanes, and the ledger, past the sequences that were given in columns."""
        if self._in_turn is None:
            return
        for lane, given in self._in_turn.untold():
            state, records = self._states[lane], given.records
            (before,) = state.pools
            num_sequences = len(given.stops)
            # The number of each record's sequence, from where the sequences end in the records.
            numbers = np.searchsorted(given.stops, np.arange(len(records)), side="right")
            records["sequence"] = state.sequences + numbers
            after = Progress(
                given.next_place,
                before.sequences + num_sequences,
                before.tokens + given.num_tokens,
                before.documents + given.num_documents,
            )
            digest = chain(state.digest, records, given.stops.tolist())
            self._states[lane] = LaneState(digest, (after,), state.sequences + num_sequences)
            if self.ledger is not None:
                self.ledger.add(lane, records, ())

    def _count(self, num_sequences: int) -> None:
        """Advance the place of the run past so many sequences of this rank, and as many of each other rank."""
        self._samples += num_sequences * self._reader.data_size * self._reader.num_runs
        self._turn = (self._turn + num_sequences) % len(self.lanes)


def _next_turn(cursor: Cursor, lanes: list[int]) -> int:
    """Give the place in a run's `lanes` of the next lane; 0 if the run that made the cursor had other lanes."""
    shares, next_lane = cursor.shares, cursor.next_lane
    lanes_of_cursor = list(range(cursor.num_lanes))
    if shares is not None:
        lanes_of_cursor = shares.lanes_of(shares.readers[next_lane])
    return lanes.index(next_lane) if lanes == lanes_of_cursor else 0
