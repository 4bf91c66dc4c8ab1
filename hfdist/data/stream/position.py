"""Where the stream of a data rank stands: the lanes that it reads, how far each of them is, and whose turn it is.

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
    """Who reads: a data rank of one of the runs that share the lanes."""

    data_rank: int
    data_size: int
    run: int
    num_runs: int


class _Dealt(NamedTuple):
    """The lanes that are read at a cursor."""

    shares: Shares | None
    """Which run reads which lanes; None: there is one run."""
    of_run: list[int]
    of_rank: list[int]


class StreamPosition:
    """The position of one data rank. It goes on with each sequence that is given, and its ledger with it.

    Args:
        corpus: the documents.
        plan: of the lanes.
        identity: hash of all that decides which token stands where; a cursor of another one is refused.
        num_lanes: of all runs and ranks.
        reader: who reads.
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
        """How often other lanes came to this rank, or others of their sequences."""
        self._num_lanes, self._reader, self._global_batch_size = num_lanes, reader, global_batch_size
        self._stand_at(self._beginning(0))

    def _beginning(self, samples: int) -> Cursor:
        """Where all lanes begin, after so many sequences of other data."""
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
        self.shares, self.lanes_of_run, self.lanes = self._dealt_at(cursor)
        self._states = {lane: cursor.lanes[lane] for lane in self.lanes}
        self._of_others = {}
        if self._reader.num_runs > 1:
            self._of_others = {lane: own for lane, own in cursor.lanes.items() if lane not in self.lanes_of_run}
        self._samples = cursor.samples
        self._turn = _next_turn(cursor, self.lanes_of_run) // self._reader.data_size
        """Which of this rank's lanes gives the next sequence: its place among them."""
        self._in_turn: SequencesInTurn | None = None
        """Where batches come from, if they are taken in columns: not all of those given are in `_states` yet."""

    def _dealt_at(self, cursor: Cursor) -> _Dealt:
        shares, of_run = None, list(range(cursor.num_lanes))
        data_rank, data_size, run, num_runs = self._reader
        if num_runs > 1:
            fits = cursor.shares is not None and cursor.shares.count == num_runs
            shares = cursor.shares if fits else Shares.at_home(cursor.num_lanes, num_runs)
            assert shares is not None
            of_run = shares.lanes_of(run)
        if len(of_run) % data_size != 0:
            what = "the data ranks cannot share the lanes that this run reads evenly"
            found = f"{len(of_run)} lanes for {data_size} data ranks"
            raise CheckpointError(what, where="cursor.shares", found=found, hint="the layout of the checkpoint")
        return _Dealt(shares, of_run, of_run[data_rank::data_size])

    def at_beginning(self) -> Self:
        """Give another stream of the same data for this rank, which stands where they begin, and writes no ledger."""
        other = copy.copy(self)
        other.ledger = None
        other._stand_at(self._beginning(0))
        return other

    def ahead(self) -> Self:
        """Give another stream of the same data for this rank, which stands where this does, and writes no ledger."""
        self._catch_up()
        other = copy.copy(self)
        other.ledger, other._states, other._in_turn = None, dict(self._states), None
        return other

    @property
    def num_samples(self) -> int:
        """Sequences that all runs have read, if all are as far as this one."""
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
        """Give `cursor` as values for JSON."""
        return self.cursor().to_json()

    def cursor(self) -> Cursor:
        """Give the cursor of this rank's lanes, after what was given (not what was read ahead).

        If several runs share the lanes, it has also those of the others, as of the last `deal`.
        """
        self._catch_up()
        return Cursor(
            identity=self.identity,
            contents=self.corpus.inventory.digest,
            num_lanes=self._num_lanes,
            samples=self._samples,
            lanes=self._states | self._of_others,
            # A run to which no lane was dealt may begin at another's cursor, and gets some.
            next_lane=self.lanes_of_run[self._turn * self._reader.data_size] if self.lanes_of_run else 0,
            shares=self.shares,
        )

    def load_state_dict(
        self, state: Mapping[str, object], columns: Columns | None = None, *, ledger: Path | None = None
    ) -> None:
        """Resume after `state`: of this rank, or merged from any number of ranks.

        Args:
            state: see `state_dict`; with columns, see `Cursor.to_columns`.
            columns: where the lanes stand, if `state` does not say it.
            ledger: ledger folder of its run, which says what the run's files held; None: this stream's own, if any.

        Raises:
            CheckpointError: the cursor is of other data, another tokenizer or other settings.
        """
        cursor = Cursor.from_json(state, columns)
        self._check_identity(cursor, ledger)
        if cursor.identity != self.identity:
            self._begin_anew(cursor)
            return
        if cursor.num_lanes != self._num_lanes:
            # The identity counts lanes, too.
            what, found = "the data cursor is damaged", cursor.num_lanes
            raise CheckpointError(what, where="cursor.lanes", found=found, allowed=str(self._num_lanes))
        self.corpus.inventory.check(cursor.contents, self._ledger_folder(ledger), may_change=self.may_begin_anew)
        _, of_run, of_rank = self._dealt_at(cursor)
        if _next_turn(cursor, of_run) % self._reader.data_size != 0:
            raise CheckpointError("the cursor stands inside a global batch", where="cursor", found=cursor.samples)
        for lane in of_rank:
            self._check_lane(lane, cursor.lanes.get(lane))
        self._stand_at(cursor)
        # Where runs share the lanes, it is not known yet how much of the ledger counts: see `Shares.counted`.
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
        places = [] if state is None else [progress.place for progress in state.pools]
        fits = len(places) == len(self.plan.orders) and all(
            # At the end of an epoch there is no document to stand in.
            place.position < (length := order.lane_length(place.epoch, lane)) or place[1:] == (length, 0)
            for place, order in zip(places, self.plan.orders, strict=True)
        )
        if not fits:
            where = f"cursor.places, lane {lane}"
            raise CheckpointError("the data cursor is damaged", where=where, found=places or "no place")

    def _begin_anew(self, before: Cursor) -> None:
        """Read the new data from their beginning, and count on from where a step and a round of lanes begin."""
        logger.warning("the data, the tokenizer or data.* have changed since the checkpoint: they are read anew")
        whole = math.lcm(self._num_lanes, self._global_batch_size or 1)
        self._stand_at(self._beginning(-(-before.samples // whole) * whole))
        if self.ledger is not None:
            self.ledger.set_aside(self.lanes, before.samples)

    def deal(self, cursor: Cursor) -> None:
        """Read the lanes that are this run's by now.

        Args:
            cursor: states of all lanes, with the shares that hold from here on.
        """
        self._catch_up()
        before, in_turn = self.lanes_of_run, self._in_turn
        self._stand_at(cursor)
        if self.lanes_of_run == before:
            # Batches go on to come from there.
            self._in_turn = in_turn
        else:
            self._turn = 0
            self.num_deals += 1

    def go_on_as(self, cursor: Cursor) -> None:
        """Go on at the place of another run. What this one has read since its last exchange does not count.

        Args:
            cursor: of the other run: all lanes, with the shares that hold from here on.
        """
        self._stand_at(cursor)
        self._turn = 0
        self.num_deals += 1
        if self.ledger is not None:
            self.ledger.go_back({lane: self._counted(lane) for lane in range(self._num_lanes)})

    def truncate_ledger(self) -> None:
        """Truncate the ledger to where this stream stands: a run that was killed has written more."""
        if self.ledger is not None:
            others = {lane: self._counted(lane) for lane in self._of_others}
            self.ledger.go_back(others | {lane: state.sequences for lane, state in self._states.items()})

    def _counted(self, lane: int) -> int:
        """Up to which sequence of a lane the records of this run count."""
        assert self.shares is not None
        return self.shares.end_of(lane, self._reader.run)

    def _ledger_folder(self, ledger: Path | None) -> Path | None:
        return self.ledger.folder if ledger is None and self.ledger is not None else ledger

    def lanes_of_worker(self, worker: int, num_workers: int) -> list[int]:
        """Lanes that a worker reads from here on, in the order of their turns."""
        first = self._turn + worker
        return [self.lanes[turn % len(self.lanes)] for turn in range(first, first + len(self.lanes), num_workers)]

    def _states_of_worker(self, worker: int, num_workers: int) -> dict[int, LaneState]:
        self._catch_up()
        return {lane: self._states[lane] for lane in self.lanes_of_worker(worker, num_workers)}

    def _go_past(self, given: LaneSequence) -> None:
        """Advance the state of a lane, and the ledger, past a sequence of it."""
        (lane, pool, sequence), (digest, pools, number) = given, self._states[given.lane]
        if pool is None:
            self._states[lane] = LaneState(digest, pools, number + 1)
            return
        records = sequence.records
        records["sequence"] = number
        _, num_sequences, num_tokens, num_documents = pools[pool]
        after = Progress(
            sequence.next_place,
            num_sequences + 1,
            num_tokens + sequence.num_tokens,
            num_documents + sequence.num_documents,
        )
        pools = (after,) if len(pools) == 1 else (*pools[:pool], after, *pools[pool + 1 :])
        self._states[lane] = LaneState(chain(digest, records), pools, number + 1)
        if self.ledger is not None:
            self.ledger.add(lane, records, sequence.problems)

    def _catch_up(self) -> None:
        """Advance the states of lanes, and the ledger, past what was given in columns."""
        for lane, given in self._in_turn.untold() if self._in_turn is not None else ():
            (digest, (progress,), number), records = self._states[lane], given.records
            num_sequences = len(given.stops)
            records["sequence"] = number + np.searchsorted(given.stops, np.arange(len(records)), side="right")
            after = Progress(
                given.next_place,
                progress.sequences + num_sequences,
                progress.tokens + given.num_tokens,
                progress.documents + given.num_documents,
            )
            digest = chain(digest, records, given.stops.tolist())
            self._states[lane] = LaneState(digest, (after,), number + num_sequences)
            if self.ledger is not None:
                self.ledger.add(lane, records, ())

    def _count(self, num_sequences: int) -> None:
        """Advance the place of the run, past so many sequences of this rank."""
        self._samples += num_sequences * self._reader.data_size * self._reader.num_runs
        self._turn = (self._turn + num_sequences) % len(self.lanes)


def _next_turn(cursor: Cursor, lanes: list[int]) -> int:
    """Which of a run's lanes gives the next sequence: the first one, if the run of the cursor had other lanes."""
    shares, next_lane = cursor.shares, cursor.next_lane
    before = list(range(cursor.num_lanes)) if shares is None else shares.lanes_of(shares.readers[next_lane])
    return lanes.index(next_lane) if lanes == before else 0
