"""The training stream: this data rank's share of every global batch, in the run's one order."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, Packing, TooLong
from hfdist.data.cache.files import digest_of
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.cursor import Cursor, LaneState, Progress
from hfdist.data.order.mixture import make_mixture
from hfdist.data.order.records import chain
from hfdist.data.order.shuffle import LaneOrder, lanes_of_rank
from hfdist.data.packing.best_fit import RULE
from hfdist.data.packing.sequence import Sequence, Shape
from hfdist.data.stream.collate import collate
from hfdist.data.stream.lane import Packed, Plan, open_lanes
from hfdist.data.stream.ledger import Ledger
from hfdist.data.stream.loader import StreamLoader
from hfdist.data.tokenization.encoders import Encoders, check_token_sources
from hfdist.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class TokenStream(IterableDataset[dict[str, torch.Tensor]]):
    """Sequences of one data rank: input_ids, position_ids and labels of shape [sequence_length], int64.

    Sequence s of data rank r is sequence s * data_size + r of the run. `state_dict` tells what was handed out. It ends
    where every source has a limit of epochs, once all documents of this rank's lanes were given. Under
    `data.packing=none` a sequence is one document, with attention_mask in place of position_ids.

    Args:
        corpus: the documents.
        tokenizer: must have an end-of-text token.
        config: `data.*`.
        data_rank: which share of the global batch this stream gives.
        data_size: number of shares; divides the lanes.
        global_batch_size: sequences in a step of the run, by which `data.anneal` counts.

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
    ) -> None:
        self.corpus, self.config = corpus, config
        self.ledger: Ledger | None = None
        """Where everything that is handed out is written down, if anywhere."""
        self.may_begin_anew = False
        """Whether to read other data from their beginning where a cursor is of those before, instead of refusing it."""
        self._encoders = Encoders(tokenizer, config.chat)
        check_token_sources(config.sources, self._encoders)
        self._global_batch_size = global_batch_size
        self._data_rank, self._data_size = data_rank, data_size
        self.plan = _make_plan(corpus, tokenizer, config, global_batch_size)
        self.identity = _identity(corpus, self._encoders, config, global_batch_size)
        """Of all that decides which token stands where."""
        self.lanes = lanes_of_rank(data_rank, data_size, config.lanes)
        start = LaneState(digest=0, pools=(Progress(),) * len(corpus.pools))
        self._states = dict.fromkeys(self.lanes, start)
        self._num_sequences = 0
        """Handed out by this data rank."""

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor of this rank's lanes, after what was handed out (not what was read ahead)."""
        return Cursor(
            identity=self.identity,
            contents=self.corpus.inventory.digest,
            num_lanes=self.config.lanes,
            samples=self._num_sequences * self._data_size,
            lanes=dict(self._states),
        ).to_json()

    def load_state_dict(self, state: dict[str, Any], *, ledger: Path | None = None) -> None:
        """Go on behind `state`: of this rank, or merged from the ranks of any number of them.

        Args:
            state: see `state_dict`.
            ledger: folder of the run that it is of, in which stands what its files held; None: this stream's own, if
                any.

        Raises:
            CheckpointError: the cursor is of other data, another tokenizer or other settings.
        """
        self.check_identity(state, ledger=ledger)
        cursor = Cursor.from_json(state)
        if cursor.identity != self.identity:
            self._begin_anew(cursor)
            return
        folder = self._noted_in(ledger)
        self.corpus.inventory.check(cursor.contents, folder, may_change=self.may_begin_anew)
        if cursor.samples % self._data_size != 0:
            raise CheckpointError("the cursor stands inside a global batch", where="cursor", found=cursor.samples)
        for lane in self.lanes:
            self._check(lane, cursor.lanes.get(lane))
        self._states = {lane: cursor.lanes[lane] for lane in self.lanes}
        if cursor.contents is None:
            self._states = {lane: self._with_documents(lane, state) for lane, state in self._states.items()}
        self._num_sequences = cursor.samples // self._data_size
        self.cut_ledger()

    def check_identity(self, state: dict[str, Any], *, ledger: Path | None = None) -> None:
        """Refuse what is told without looking at the places, unless other data may be begun anew. Changes nothing.

        Args:
            state: see `load_state_dict`.
            ledger: likewise.

        Raises:
            CheckpointError: the cursor is of other data, another tokenizer or other settings.
        """
        cursor = Cursor.from_json(state)
        if cursor.identity == self.identity or self.may_begin_anew:
            return
        changes = self.corpus.inventory.changes_since(cursor.contents, self._noted_in(ledger))
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

    def _noted_in(self, ledger: Path | None) -> Path | None:
        return self.ledger.folder if ledger is None and self.ledger is not None else ledger

    def _begin_anew(self, before: Cursor) -> None:
        """Go on counting the run's sequences, from the next at which a step and a round of lanes begin."""
        logger.warning("the data, the tokenizer or data.* have changed since the checkpoint: they are read anew")
        whole = math.lcm(self.config.lanes, self._global_batch_size or 1)
        self._num_sequences = -(-before.samples // whole) * whole // self._data_size
        if self.ledger is not None:
            self.ledger.set_aside(self.lanes, before.samples)

    def cut_ledger(self) -> None:
        """Cut off what a run that was killed has written into the ledger behind where this stream stands."""
        if self.ledger is not None:
            self.ledger.go_back({lane: self._count(lane) for lane in self.lanes})

    def _check(self, lane: int, state: LaneState | None) -> None:
        places = [] if state is None else [progress.place for progress in state.pools]
        fits = len(places) == len(self.plan.orders) and all(
            # At the end of an epoch there is no document to stand in.
            place.position < (length := order.lane_length(place.epoch, lane)) or place[1:] == (length, 0)
            for place, order in zip(places, self.plan.orders, strict=True)
        )
        if not fits:
            raise CheckpointError(
                "the data cursor is damaged", where=f"cursor.places, lane {lane}", found=places or "no place"
            )

    def _with_documents(self, lane: int, state: LaneState) -> LaneState:
        """Fill in, by the places, what an older cursor does not count."""
        return state._replace(
            pools=tuple(
                progress._replace(
                    documents=progress.place.position
                    + sum(order.lane_length(epoch, lane) for epoch in range(progress.place.epoch))
                )
                for progress, order in zip(state.pools, self.plan.orders, strict=True)
            )
        )

    def _count(self, lane: int) -> int:
        """Sequences that a lane has handed out."""
        full_rounds, rest = divmod(self._num_sequences, len(self.lanes))
        return full_rounds + (self.lanes.index(lane) < rest)

    @property
    def may_lack_targets(self) -> bool:
        """Whether a whole batch may have no target: a source ends, documents are taken out, or pieces are context."""
        has_limit = any(pool.epochs is not None for pool in self.corpus.pools)
        return self.corpus.has_examples or bool(self.corpus.quarantined) or has_limit

    @property
    def has_ended(self) -> bool:
        """Whether all lanes of this rank have handed out their last sequence."""
        return all(
            self.plan.is_finished(pool, lane, progress.place)
            for lane, state in self._states.items()
            for pool, progress in enumerate(state.pools)
        )

    def loader(self, *, micro_batch_size: int) -> StreamLoader:
        """Give micro batches, read ahead by `data.workers` processes."""
        return StreamLoader(self, micro_batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give one sequence after the other, read in this process.

        In a worker of a torch DataLoader: that worker's share.
        """
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if len(self.lanes) % num_workers != 0:
            raise ConfigError(
                "the workers of the DataLoader do not divide the lanes of this data rank",
                where="num_workers",
                found=f"{num_workers}, with {len(self.lanes)} lanes",
                hint="stream.loader(micro_batch_size=...), which reads ahead with data.workers processes",
            )
        num_ended = 0
        for packed in self.packed(worker, num_workers):
            # Workers of a DataLoader know only of their own lanes, so that `has_ended` would never come.
            num_ended = 0 if packed[1] is not None else num_ended + 1
            if num_ended == len(self.lanes) // num_workers:
                return
            batch = self.next_batch([packed])
            if packed[1] is not None:
                yield {name: rows[0] for name, rows in batch.items()}

    def lanes_of_worker(self, worker: int, num_workers: int) -> list[int]:
        """Lanes that a worker owns from here on, in the order of their turns."""
        number = self._num_sequences + worker
        return [self.lanes[turn % len(self.lanes)] for turn in range(number, number + len(self.lanes), num_workers)]

    def packed(self, worker: int, num_workers: int) -> Iterator[Packed]:
        """The share of one worker, which owns whole lanes: sequences worker, worker + num_workers, ... from here on.

        Args:
            worker: number of this one.
            num_workers: divides the lanes of this rank.
        """
        cache = open_token_cache(self.config)
        documents = Documents(self.corpus, self._encoders, cache, self.config)
        number = self._num_sequences + worker
        turns = self.lanes_of_worker(worker, num_workers)
        lanes = open_lanes(self.plan, documents, {lane: self._states[lane].pools for lane in turns})
        for lane in itertools.cycle(lanes.values()):
            yield lane.next(number * self._data_size + self._data_rank)
            number += num_workers

    def next_batch(self, packed: list[Packed]) -> dict[str, torch.Tensor]:
        """Stack sequences to a micro batch, and remember that they are gone."""
        for lane, pool, sequence in packed:
            if pool is not None:
                self._note(lane, pool, sequence)
            self._num_sequences += 1
        return collate([sequence for _, _, sequence in packed], self.plan.packing, self.plan.shape)

    def _note(self, lane: int, pool: int, sequence: Sequence) -> None:
        (digest, pools), records = self._states[lane], sequence.records
        # The lane's turn: each round of this rank serves each of its lanes once.
        records["sequence"] = self._num_sequences // len(self.lanes)
        _, num_sequences, num_tokens, num_documents = pools[pool]
        num_documents += int(np.count_nonzero(records["first_token"] == 0))
        after = Progress(sequence.next_place, num_sequences + 1, num_tokens + sequence.num_tokens, num_documents)
        pools = (after,) if len(pools) == 1 else (*pools[:pool], after, *pools[pool + 1 :])
        self._states[lane] = LaneState(chain(digest, records), pools)
        if self.ledger is not None:
            self.ledger.add(lane, records, sequence.problems)


def _make_plan(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig, global_batch_size: int | None
) -> Plan:
    if config.anneal and global_batch_size is None:
        raise ConfigError(
            "weights that change at a step need the number of sequences in one",
            where="data.anneal",
            hint="TokenStream(..., global_batch_size=...)",
        )
    weights = {name: source.weight for name, source in config.sources.items()}
    changes = [(change.step * (global_batch_size or 0), change.weights) for change in config.anneal]
    fill_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Plan(
        pools=corpus.pools,
        orders=[
            LaneOrder(
                [shard.runs for shard in pool.shards],
                lanes=config.lanes,
                key=(config.seed, pool.name),
                first_document=pool.first_document,
            )
            for pool in corpus.pools
        ],
        mixture=make_mixture({pool.name: weights.get(pool.name) for pool in corpus.pools}, changes, lanes=config.lanes),
        packing=config.packing,
        too_long=config.too_long,
        shape=Shape(config.sequence_length, fill_id),
        seed=config.seed,
    )


def _identity(corpus: Corpus, encoders: Encoders, config: DataConfig, global_batch_size: int | None) -> str:
    """Hash of all that decides which token stands where."""
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
