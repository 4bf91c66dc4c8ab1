"""The training stream: this data rank's share of every global batch, in the run's one order."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, Packing, TooLong
from hfdist.data.cache import digest_of
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.image_reader import ImageReader
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.lane_state import Columns, LaneState, Progress
from hfdist.data.order.records import chain, numbers_of
from hfdist.data.order.shares import Shares
from hfdist.data.order.shuffle import LaneOrder, Mixture, workers_that_fit
from hfdist.data.packing.packed_images import packed_row, stack_packed_rows
from hfdist.data.packing.sequence import (
    NAMES,
    ORIGINS,
    POSITION_IDS,
    Sequence,
    Shape,
    collate,
    image_row,
    origins_of,
    stack,
    stack_rows,
)
from hfdist.data.packing.windows import RULE
from hfdist.data.stream.lane import LanePlan, Packed, SequencesInTurn, open_lanes, open_turns
from hfdist.data.stream.ledger import Ledger
from hfdist.data.stream.read_ahead import read_ahead
from hfdist.data.tokenization.encoders import Encoders, check_token_sources
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

DOCUMENTS = "documents"
"""Key in a batch whose rows are documents, with `data.keep_columns`: their numbers, -1 without one; shape [rows]."""


class TokenStream(IterableDataset[dict[str, torch.Tensor]]):
    """Sequences of one data rank: input_ids, position_ids and labels of shape [sequence_length], int64.

    Sequence s of data rank r is sequence s * data_size + r of the run. If several runs share the lanes, `deal` says who
    reads which. If every source has a limit of epochs, it ends once all documents of this rank's lanes were given.
    Under `data.packing=none` a sequence is one document, with attention_mask in place of position_ids. With images a
    batch also has what a forward takes of these, and position_ids may be those of `stack_packed_rows`.

    Args:
        corpus: the documents.
        tokenizer: must have an end-of-text token.
        config: `data.*`.
        data_rank: of this process.
        data_size: number of data ranks; divides the lanes.
        global_batch_size: sequences in a step of all runs together, by which `data.anneal` counts.
        run: number of this run, and how many share the lanes.

    Raises:
        ConfigError: token files that another tokenizer made, or `data.anneal` without `global_batch_size`.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        global_batch_size: int | None = None,
        run: tuple[int, int] = (0, 1),
    ) -> None:
        if config.packing is Packing.auto:
            # Rows with images are asked before: see run/images.py.
            config = replace(config, packing=Packing.best_fit)
        self.corpus, self.config = corpus, config
        self.images: ImageTokens | None = None
        """What images of rows become, by `read_images`; None: rows have none."""
        self.needs_image = False
        """Whether each batch must have an image: see `stack_rows`."""
        self.tells_images_by_row = False
        """Whether a batch says how many of its images each row has, by which it is cut: see `stack_images`."""
        self.decodes = True
        """Whether sequences come with the tensors of their images; who counts needs none."""
        self.ledger: Ledger | None = None
        """The record of all sequences given, if there is one."""
        self.may_begin_anew = False
        """Whether to accept a cursor of other data, and read these from their beginning."""
        self.tells_images = False
        """Whether a batch says which images its documents have: see `packed_row`."""
        self.tells_origins = False
        """Whether batches say of which documents they are made, for what is drawn by document and epoch."""
        self._encoders = Encoders.of(tokenizer, config)
        check_token_sources(config.sources, self._encoders)
        self._global_batch_size = global_batch_size
        self._data_rank, self._data_size, (self._run, self._num_runs) = data_rank, data_size, run
        self.plan = _make_plan(corpus, tokenizer, config, global_batch_size)
        self.identity = _identity(corpus, self._encoders, config, global_batch_size)
        """Hash of all that decides which token stands where."""
        self.num_deals = 0
        """How often other lanes came to this rank, or others of their sequences."""
        self._take(self._beginning(0))

    def read_images(self, images: ImageTokens | None) -> TokenStream:
        """Let rows have images, before anything is read; None: as it is. Give the stream."""
        if images is not None:
            self.images, self._encoders = images, self._encoders.with_images(images)
            self.identity = _identity(self.corpus, self._encoders, self.config, self._global_batch_size)
            self._take(self._beginning(0))
        return self

    def at_beginning(self) -> TokenStream:
        """Give another stream of the same data for this rank, which stands where they begin, and writes no ledger."""
        other = copy.copy(self)
        other.ledger = None
        other._take(self._beginning(0))
        return other

    def ahead(self) -> TokenStream:
        """Give another stream of the same data for this rank, which stands where this does, and writes no ledger."""
        self._note_turns()
        other = copy.copy(self)
        other.ledger, other._states, other._in_turn = None, dict(self._states), None
        return other

    @property
    def num_samples(self) -> int:
        """Sequences that all runs have read, if all are as far as this one."""
        return self._samples

    def state_dict(self) -> dict[str, Any]:
        """Give `cursor` as values for JSON."""
        return self.cursor().to_json()

    def cursor(self) -> Cursor:
        """Give the cursor of this rank's lanes, after what was given (not what was read ahead).

        If several runs share the lanes, it has also those of the others, as of the last `deal`.
        """
        self._note_turns()
        return Cursor(
            identity=self.identity,
            contents=self.corpus.inventory.digest,
            num_lanes=self.config.lanes,
            samples=self._samples,
            lanes=self._states | self._of_others,
            # A run to which no lane was dealt may begin at another's cursor, and gets some.
            next_lane=self.lanes_of_run[self._turn * self._data_size] if self.lanes_of_run else 0,
            shares=self.shares,
        )

    def _beginning(self, samples: int) -> Cursor:
        """Where all lanes begin, after so many sequences of other data."""
        start = LaneState(
            digest=0, pools=(Progress(),) * len(self.corpus.pools), sequences=samples // self.config.lanes
        )
        return Cursor(
            identity=self.identity,
            contents=self.corpus.inventory.digest,
            num_lanes=self.config.lanes,
            samples=samples,
            lanes=dict.fromkeys(range(self.config.lanes), start),
            next_lane=0,
        )

    def _lanes_at(self, cursor: Cursor) -> tuple[Shares | None, list[int], list[int]]:
        """Give the shares at a cursor, the lanes of this run, and those of this rank."""
        shares, of_run = None, list(range(cursor.num_lanes))
        if self._num_runs > 1:
            fits = cursor.shares is not None and cursor.shares.count == self._num_runs
            shares = cursor.shares if fits else Shares.at_home(cursor.num_lanes, self._num_runs)
            assert shares is not None
            of_run = shares.lanes_of(self._run)
        if len(of_run) % self._data_size != 0:
            what = "the data ranks cannot share the lanes that this run reads evenly"
            found = f"{len(of_run)} lanes for {self._data_size} data ranks"
            raise CheckpointError(what, where="cursor.shares", found=found, hint="the layout of the checkpoint")
        return shares, of_run, of_run[self._data_rank :: self._data_size]

    def _take(self, cursor: Cursor) -> None:
        """Stand at a cursor."""
        self.shares, self.lanes_of_run, self.lanes = self._lanes_at(cursor)
        self._states = {lane: cursor.lanes[lane] for lane in self.lanes}
        self._of_others = {}
        if self._num_runs > 1:
            self._of_others = {lane: own for lane, own in cursor.lanes.items() if lane not in self.lanes_of_run}
        self._samples = cursor.samples
        self._turn = _next_turn(cursor, self.lanes_of_run) // self._data_size
        """Which of this rank's lanes gives the next sequence: its place among them."""
        self._in_turn: SequencesInTurn | None = None
        """Where batches come from, if they are taken in columns: not all of those given are in `_states` yet."""

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
        if cursor.num_lanes != self.config.lanes:
            # The identity counts lanes, too.
            what, found = "the data cursor is damaged", cursor.num_lanes
            raise CheckpointError(what, where="cursor.lanes", found=found, allowed=str(self.config.lanes))
        self.corpus.inventory.check(cursor.contents, self._ledger_folder(ledger), may_change=self.may_begin_anew)
        _, lanes_of_run, lanes = self._lanes_at(cursor)
        if _next_turn(cursor, lanes_of_run) % self._data_size != 0:
            raise CheckpointError("the cursor stands inside a global batch", where="cursor", found=cursor.samples)
        for lane in lanes:
            self._check_lane(lane, cursor.lanes.get(lane))
        self._take(cursor)
        if self.shares is None:
            # Else it begins once it knows what counts.
            self.truncate_ledger()

    def deal(self, cursor: Cursor) -> None:
        """Read the lanes that are this run's by now.

        Args:
            cursor: states of all lanes, with the shares that hold from here on.
        """
        self._note_turns()
        before, in_turn = self.lanes_of_run, self._in_turn
        self._take(cursor)
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
        self._take(cursor)
        self._turn = 0
        self.num_deals += 1
        if self.ledger is not None:
            self.ledger.go_back({lane: self._counted(lane) for lane in range(self.config.lanes)})

    def _counted(self, lane: int) -> int:
        """Up to which sequence of a lane the records of this run count."""
        assert self.shares is not None
        return self.shares.end_of(lane, self._run)

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

    def _ledger_folder(self, ledger: Path | None) -> Path | None:
        return self.ledger.folder if ledger is None and self.ledger is not None else ledger

    def _begin_anew(self, before: Cursor) -> None:
        """Read the new data from their beginning, and count on from where a step and a round of lanes begin."""
        logger.warning("the data, the tokenizer or data.* have changed since the checkpoint: they are read anew")
        whole = math.lcm(self.config.lanes, self._global_batch_size or 1)
        self._take(self._beginning(-(-before.samples // whole) * whole))
        if self.ledger is not None:
            self.ledger.set_aside(self.lanes, before.samples)

    def truncate_ledger(self) -> None:
        """Truncate the ledger to where this stream stands: a run that was killed has written more."""
        if self.ledger is not None:
            others = {lane: self._counted(lane) for lane in self._of_others}
            self.ledger.go_back(others | {lane: state.sequences for lane, state in self._states.items()})

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

    @property
    def may_lack_targets(self) -> bool:
        """Whether a batch may have no target: a source ends, documents are quarantined, or pieces are context."""
        has_limit = any(pool.epochs is not None for pool in self.corpus.pools)
        return self.corpus.has_examples or bool(self.corpus.quarantined) or has_limit

    @property
    def has_ended(self) -> bool:
        """Whether all lanes of this rank have given their last sequence."""
        return all(
            self.plan.is_finished(pool, lane, progress.place)
            for lane, state in self._states.items()
            for pool, progress in enumerate(state.pools)
        )

    def loader(self, *, batch_size: int | None = None, micro_batch_size: int | None = None) -> StreamLoader:
        """Give batches, read ahead by `data.workers` processes.

        Args:
            batch_size: sequences in each. In a run, a forward and backward pass of this data rank takes one batch: a
                micro batch, or under a pipeline all micro batches of a step.
            micro_batch_size: the older name of `batch_size`.
        """
        if micro_batch_size is not None:
            message = (
                "micro_batch_size of TokenStream.loader is now batch_size; the old name goes with the next release"
            )
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        size = micro_batch_size if batch_size is None else batch_size
        if size is None:
            raise TypeError("TokenStream.loader needs batch_size")
        return StreamLoader(self, size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give one sequence after the other, read in this process; a worker of a torch DataLoader gives its share."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if len(self.lanes) % num_workers != 0:
            raise ConfigError(
                "the workers of the DataLoader do not divide the lanes of this data rank",
                where="num_workers",
                found=f"{num_workers}, with {len(self.lanes)} lanes",
                hint="stream.loader(batch_size=...), which reads ahead with data.workers processes",
            )
        num_ended = 0
        for packed in self.packed(worker, num_workers):
            # A worker of a DataLoader knows only its own lanes, so that `has_ended` would stay false.
            num_ended = 0 if packed.pool is not None else num_ended + 1
            if num_ended == len(self.lanes) // num_workers:
                return
            batch = self.next_batch([packed])
            if packed.pool is not None:
                yield {name: rows[0] for name, rows in batch.items()}

    def lanes_of_worker(self, worker: int, num_workers: int) -> list[int]:
        """Lanes that a worker reads from here on, in the order of their turns."""
        first = self._turn + worker
        return [self.lanes[turn % len(self.lanes)] for turn in range(first, first + len(self.lanes), num_workers)]

    def packed(self, worker: int, num_workers: int) -> Generator[Packed]:
        """Give sequences worker, worker + num_workers, ... from here on; num_workers divides the lanes of this rank."""
        states = self._states_of_worker(worker, num_workers)
        lanes = open_lanes(self.plan, self._open_documents(), {lane: state.pools for lane, state in states.items()})
        images = None if self.images is None or not self.decodes else ImageReader(self.corpus, self.images, self.config)
        for turn in itertools.count():
            for number, lane in lanes.items():
                packed = lane.next((states[number].sequences + turn) * self.config.lanes + number)
                yield packed if images is None else packed._replace(sequence=images.read(packed.sequence))

    def _states_of_worker(self, worker: int, num_workers: int) -> dict[int, LaneState]:
        self._note_turns()
        return {lane: self._states[lane] for lane in self.lanes_of_worker(worker, num_workers)}

    def _open_documents(self) -> Documents:
        return Documents(self.corpus, self._encoders, open_token_cache(self.config), self.config)

    def batches_in_turn(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Give batches from here on, where `plan.has_even_turns`; what `next_batch` makes of `packed`, and faster."""
        places = {lane: state.pools[0].place for lane, state in self._states_of_worker(0, 1).items()}
        if self.ledger is not None:
            self.ledger.before_count = self._note_turns
        for sequences in open_turns(self.plan, self._open_documents(), places, batch_size):
            self._note_turns()
            self._in_turn = sequences
            while (pieces := sequences.next(batch_size)) is not None:
                self._count(batch_size)
                yield stack(pieces, self.plan.shape)

    def _note_turns(self) -> None:
        """Advance the states of lanes and the ledger past what was given in columns."""
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
        self._samples += num_sequences * self._data_size * self._num_runs
        self._turn = (self._turn + num_sequences) % len(self.lanes)

    def next_batch(self, packed: list[Packed]) -> dict[str, torch.Tensor]:
        """Stack sequences to a batch, and advance the cursor and the ledger."""
        for lane, pool, sequence in packed:
            if pool is not None:
                self._note(lane, pool, sequence)
            else:
                self._states[lane] = self._states[lane]._replace(sequences=self._states[lane].sequences + 1)
        self._count(len(packed))
        sequences = [one.sequence for one in packed]
        batch = self._collate(sequences)
        if self.config.keep_columns and self.plan.packing is Packing.none:
            numbers = [next(iter(numbers_of(one.records)), -1) for one in sequences]
            batch[DOCUMENTS] = torch.tensor(numbers)
        if self.tells_origins:
            batch[ORIGINS] = origins_of(sequences)
        return batch

    def _collate(self, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
        if self.images is None:
            return collate(sequences, self.plan.packing, self.plan.shape)
        if self.plan.packing is Packing.none:
            return self.stack_rows([image_row(one, self.images) for one in sequences])
        return self.stack_rows([packed_row(one, self.images, tells_images=self.tells_images) for one in sequences])

    def stack_rows(self, rows: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Collate rows of a run with images, as of its held-out set."""
        assert self.images is not None
        stack_them = stack_packed_rows if NAMES[POSITION_IDS] in rows[0] else stack_rows
        return stack_them(
            rows,
            self.plan.shape.fill_id,
            self.images,
            needs_image=self.needs_image,
            tells_rows=self.tells_images_by_row,
        )

    def _note(self, lane: int, pool: int, sequence: Sequence) -> None:
        (digest, pools, number), records = self._states[lane], sequence.records
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


class StreamLoader:
    """Iterate over batches of a stream: tensors of shape [batch_size, sequence_length], int64.

    Never ends, so that ranks whose lanes end earlier keep in step with the others: a sequence of a lane that has ended
    has no targets. The data end when `stream.has_ended` on all ranks: a batch without targets may also be of lanes that
    ended early, or of rows taken out.
    """

    def __init__(self, stream: TokenStream, batch_size: int) -> None:
        self.dataset, self._batch_size = stream, batch_size

    def __iter__(self) -> Generator[dict[str, torch.Tensor]]:
        """Start the workers, which end with the iterator."""
        batches, num_deals = self._batches(), self.dataset.num_deals
        try:
            while True:
                if self.dataset.num_deals != num_deals:
                    # What was read ahead is of lanes that others read by now.
                    batches.close()
                    batches, num_deals = self._batches(), self.dataset.num_deals
                yield next(batches)
        finally:
            # Ends the workers now: an error would hold them until garbage is collected, and that takes five seconds.
            batches.close()

    def _batches(self) -> Generator[dict[str, torch.Tensor]]:
        """Batches of the lanes that this data rank has now."""
        num_workers = workers_that_fit(self.dataset.config.workers, len(self.dataset.lanes))
        if num_workers == 0 and self.dataset.plan.has_even_turns and not self.dataset.tells_origins:
            yield from self.dataset.batches_in_turn(self._batch_size)
        with contextlib.closing(self._sequences(num_workers)) as sequences:
            while True:
                yield self.dataset.next_batch([next(sequences) for _ in range(self._batch_size)])

    def _sequences(self, num_workers: int) -> Generator[Packed]:
        """All sequences of this data rank, in order."""
        stream, config = self.dataset, self.dataset.config
        if num_workers == 0:
            return stream.packed(0, 1)
        lanes = [sorted(stream.lanes_of_worker(worker, num_workers)) for worker in range(num_workers)]
        return read_ahead(
            stream.packed,
            lanes,
            config.prefetch,
            one_by_one=stream.images is not None,
            most_image_bytes=config.images.prefetch_bytes,
        )


def _make_plan(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig, global_batch_size: int | None
) -> LanePlan:
    if config.anneal and global_batch_size is None:
        raise ConfigError(
            "weights that change at a step need the number of sequences in one",
            where="data.anneal",
            hint="TokenStream(..., global_batch_size=...)",
        )
    # Where there is one pool only, it has no weight.
    weights = {name: source.weight or 1.0 for name, source in config.sources.items()}
    phases = [(0, tuple(weights.get(pool.name, 1.0) for pool in corpus.pools))]
    for change in config.anneal:
        phases.append(
            (change.step * (global_batch_size or 0), tuple(change.weights[pool.name] for pool in corpus.pools))
        )
    fill_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return LanePlan(
        pools=corpus.pools,
        orders=[
            LaneOrder(
                pool.runs,
                lanes=config.lanes,
                key=(config.seed, pool.name),
                first_document=pool.first_document,
            )
            for pool in corpus.pools
        ],
        mixture=Mixture(phases, lanes=config.lanes),
        packing=config.packing,
        too_long=config.too_long,
        shape=Shape(config.longest_row, fill_id),
        seed=config.seed,
    )


def _identity(corpus: Corpus, encoders: Encoders, config: DataConfig, global_batch_size: int | None) -> str:
    settings = [config.sequence_length, config.packing.value, config.seed, config.lanes]
    if config.too_long is not TooLong.split:
        settings.append(config.too_long.value)
    if config.packing is Packing.best_fit:
        settings.append(RULE)
    tokens = encoders.digest(examples=corpus.has_examples)
    mixture = [
        # Not the epochs: with another number of them, each document stays where it is.
        [[name, source.weight, None] for name, source in sorted(config.sources.items())],
        [global_batch_size, [asdict(change) for change in config.anneal]] if config.anneal else [],
    ]
    return digest_of([4, corpus.fingerprint, tokens, *settings, mixture])


def _next_turn(cursor: Cursor, lanes: list[int]) -> int:
    """Which of a run's lanes gives the next sequence: the first one, if the run of the cursor had other lanes."""
    shares, next_lane = cursor.shares, cursor.next_lane
    before = list(range(cursor.num_lanes)) if shares is None else shares.lanes_of(shares.readers[next_lane])
    return lanes.index(next_lane) if lanes == before else 0
