"""The proof that a run read every document as often as planned: its ledger against the arithmetic of its order.

plan      7 4 9 2 8 ...       a lane's order of an epoch
records   7 4 4 9|2 2 8       pieces; `|` a sequence ends

Packing may choose the order of documents inside a window. All else is fixed: which documents an epoch has, that their
pieces leave nothing out and do not overlap, and from which place on documents may still be missing. Sequences are
numbered without a gap, each is of the source whose turn it was, and checkpoints have digested the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hfdist.config.data import Packing, TooLong
from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.cursor import Cursor, LaneState, Place
from hfdist.data.order.records import Records, Status, chain
from hfdist.data.stream.lane import LanePlan
from hfdist.errors import DataError, printable

Integers = NDArray[np.int64]

_MOST_NAMES = 20
_NO_POOL = -1
_UNKNOWN = Place(-1, -1, -1)
# Documents with tokens whose order packing may choose. Stated here again, to be independent of the packing code.
_WINDOW_DOCUMENTS = {Packing.concat: 1, Packing.best_fit: 1024, Packing.none: 64}
_HEADS = ("source", *(status.name.replace("_", " ") for status in Status), "tokens", "epochs")


class Discrepancy(Enum):
    """What can be wrong; the first five are of documents."""

    unplanned = "planned by the order too often or not at all"
    never = "seen too seldom"
    in_part = "seen in part only"
    again = "seen too often"
    misplaced = "seen in the wrong place"
    unreadable = "records that no run writes"
    numbering = "sequences missing or out of turn"
    source = "sequences of a source whose turn it was not"
    cursor = "not as the checkpoint counts"
    digest = "records that are not those which the checkpoint has digested"


class Discrepancies:
    """What is not as planned, by kind: how often, and the first of them by name."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.counts: dict[Discrepancy, int] = {}
        self.names: dict[Discrepancy, list[str]] = {}
        """The first `_MOST_NAMES` of each kind."""

    def add(self, kind: Discrepancy, names: Iterable[str], count: int) -> None:
        """Count `count` more of a kind; reads only as many names as are shown."""
        if count == 0:
            return
        self.counts[kind] = self.counts.get(kind, 0) + count
        known = self.names.setdefault(kind, [])
        known += [name for name, _ in zip(names, range(_MOST_NAMES - len(known)), strict=False)]

    def add_documents(
        self, kind: Discrepancy, documents: Integers, where: str, sequences: Integers | None = None
    ) -> None:
        """Count documents; `sequences` are the numbers of those in which they stand."""
        found = [None] * len(documents) if sequences is None else sequences.tolist()
        names = (
            f"{self._name(document)}{where}{'' if sequence is None else f', sequence {sequence}'}"
            for document, sequence in zip(documents.tolist(), found, strict=True)
        )
        self.add(kind, names, len(documents))

    def _name(self, document: int) -> str:
        if 0 <= document < self._corpus.num_documents:
            return printable(str(self._corpus.origin(document)))
        return f"document {document} (of {self._corpus.num_documents})"

    def __str__(self) -> str:
        """A paragraph for each kind; empty if there are none."""
        lines = []
        for kind, count in self.counts.items():
            names = self.names[kind]
            lines += [f"{kind.value}: {count:,}", *(f"  {name}" for name in names)]
            if count > len(names):
                lines.append(f"  ... and {count - len(names):,} more")
        return "\n".join(lines)


class LedgerSums:
    """Sums of a ledger by source: documents by status, tokens, epochs."""

    def __init__(self, corpus: Corpus) -> None:
        self._names = corpus.source_names
        self._rows = np.array([int(corpus.sources[name].runs.rows.sum()) for name in self._names])
        self._ends = np.cumsum(self._rows)
        self._documents = np.zeros((len(self._names), len(Status)), dtype=np.int64)
        self._tokens = np.zeros(len(self._names), dtype=np.int64)
        self.epochs: dict[int, set[int]] = {}
        """Epochs with records, by pool."""

    def add(self, records: Records) -> None:
        """Add the records of a lane. A document counts where it begins."""
        sources = np.searchsorted(self._ends, records["document"], side="right")
        begins = records["first_token"] == 0
        kinds = sources[begins] * len(Status) + records["fate"][begins]
        self._documents += np.bincount(kinds, minlength=self._documents.size).reshape(self._documents.shape)
        tokens = np.bincount(sources, weights=records["num_tokens"], minlength=len(self._names))
        self._tokens += tokens.astype(np.int64)
        for pool in np.unique(records["pool"]).tolist():
            self.epochs.setdefault(pool, set()).update(np.unique(records["epoch"][records["pool"] == pool]).tolist())

    @property
    def tokens(self) -> int:
        """Tokens of all sources."""
        return int(self._tokens.sum())

    def __str__(self) -> str:
        """A table with a line for each source."""
        rows = [_HEADS]
        for number, name in enumerate(self._names):
            counts = self._documents[number]
            epochs = counts.sum() / max(self._rows[number], 1)
            rows.append((name, *(f"{count:,}" for count in counts), f"{self._tokens[number]:,}", f"{epochs:.2f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


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
        DataError: the data, the tokenizer or data.* have changed since.
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


class PoolAudit:
    """Compares the records of one lane and pool with the order: each document once in an epoch, whole, in its place.

    Args:
        records: of this lane and pool, in the order in which they were written.
        plan: of the run.
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
        self._place = place or _UNKNOWN
        self._written = records
        # One epoch after the other, each in the order of its records.
        self._records = records[np.argsort(records["epoch"], kind="stable")]
        self._epochs = self._records["epoch"].astype(np.int64)
        self.is_finished = self._place.epoch + 1 == self._epoch_limit and self._place.position == (
            self._order.lane_length(self._place.epoch, lane)
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
            own = self._records[begin:end]
            self._check_epoch(epoch, own, is_first=epoch == epochs[0], is_last=epoch == epochs[-1])

    def _check_epochs_rise(self) -> None:
        """No document comes after those of a later epoch; one that is passed over may wait for the next sequence."""
        is_trained = self._written["num_tokens"] > 0
        for own in (self._written[is_trained], self._written[~is_trained]):
            late = own[own["epoch"] < np.maximum.accumulate(own["epoch"])]
            self._add(Discrepancy.misplaced, late["document"], late["sequence"])

    def _epochs_to_check(self) -> list[int]:
        """Epochs that have records, or must have some."""
        present = np.unique(self._epochs).tolist()
        if self._begins_inside and not present:
            return []
        first = present[0] if self._begins_inside else 0
        # Each epoch leaves a record or more, so that a damaged number cannot ask for thousands.
        last = min(max(present, default=-1), first + len(self._records))
        if self._place is not _UNKNOWN:
            last = self._place.epoch
        return sorted({*range(first, last + 1), *present})

    def _check_epoch(self, epoch: int, records: Records, *, is_first: bool, is_last: bool) -> None:
        plan = self._order.documents(epoch, self._lane)
        positions = _positions(plan, records["document"])
        self._note(Discrepancy.misplaced, records, positions < 0)
        records, positions = records[positions >= 0], positions[positions >= 0]
        is_trained = records["num_tokens"] > 0
        trained = np.flatnonzero(np.bincount(positions[is_trained], minlength=len(plan)))
        window = _WINDOW_DOCUMENTS[self._plan.packing]
        # Up to `low` and from `high` on, documents may be missing or in part.
        low, high = -1, len(plan)
        if is_first and self._begins_inside:
            low = int(trained[window - 1]) if len(trained) >= window else len(plan)
        if is_last and self._place is _UNKNOWN:
            high = int(trained[-window]) if len(trained) >= window else 0
        elif epoch >= self._place.epoch >= 0:
            high = self._place.position if epoch == self._place.epoch else 0
            offset = self._place.offset if epoch == self._place.epoch else 0
            self.agrees_with_place &= self._num_used(records[positions >= high]) == offset
        missing = np.flatnonzero(np.bincount(positions, minlength=len(plan)) == 0)
        if self._place is _UNKNOWN and epoch + 1 == self._epoch_limit:
            self.is_finished = not (missing > low).any() and self._reads_all(records[positions > low])
        self._add(Discrepancy.never, plan[missing[(missing > low) & (missing < high)]])
        self._check_order(records[is_trained], positions[is_trained], window)
        self._check_order(records[~is_trained], positions[~is_trained], 1)
        self._check_pieces(records, positions, low, high)

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


def first_sample(ledger: Sequence[Records]) -> int:
    """Number of the first sequence of a ledger in its run."""
    return min(int(own["sequence"][0]) * len(ledger) + lane for lane, own in enumerate(ledger) if len(own))


def _end_sample(ledger: Sequence[Records]) -> int:
    return max(int(own["sequence"][-1]) * len(ledger) + lane for lane, own in enumerate(ledger) if len(own)) + 1
