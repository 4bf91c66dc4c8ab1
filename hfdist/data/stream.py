"""The training stream: this data rank's share of every global batch, in the run's one order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig
from hfdist.data.corpus import Corpus
from hfdist.data.cursor import Cursor, Place
from hfdist.data.lane import Lane
from hfdist.data.order import LaneOrder, block_sizes, lanes_of_rank, workers_that_fit
from hfdist.data.pack import NAMES
from hfdist.data.tokenize import tokenizer_digest
from hfdist.errors import CheckpointError, HfdistError, ResourceError

Packed = tuple[int, Place, NDArray[np.int32]]
"""Lane, where its next sequence begins, and the sequence."""


class TokenStream(IterableDataset[dict[str, torch.Tensor]]):
    """Endless sequences of one data rank: input_ids, position_ids and labels of shape [sequence_length], int64.

    Sequence s of data rank r is sequence s * data_size + r of the run. `state_dict` tells what was handed out.

    Args:
        corpus: the documents.
        tokenizer: must have an end-of-text token.
        config: `data.*`.
        data_rank: which share of the global batch this stream gives.
        data_size: number of shares; divides the lanes.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        self._corpus, self._tokenizer, self._config = corpus, tokenizer, config
        self._data_rank, self._data_size = data_rank, data_size
        blocks = block_sizes(corpus.runs, lanes=config.lanes)
        self._order = LaneOrder(blocks, lanes=config.lanes, seed=config.seed)
        self._identity = _identity(corpus, tokenizer, config)
        self._lanes = lanes_of_rank(data_rank, data_size, config.lanes)
        self._places = dict.fromkeys(self._lanes, Place())
        self._num_sequences = 0

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor of this rank's lanes, after what was handed out (not what was read ahead)."""
        samples = self._num_sequences * self._data_size
        places = dict(self._places)
        return Cursor(identity=self._identity, lanes=self._config.lanes, samples=samples, places=places).to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind `state`: of this rank, or merged from the ranks of any number of them.

        Raises:
            CheckpointError: the cursor is of other data, another tokenizer or other settings.
        """
        cursor = Cursor.from_json(state)
        if cursor.identity != self._identity:
            raise CheckpointError(
                "the data, the tokenizer or data.* have changed since this checkpoint",
                where="cursor.identity",
                found=self._identity,
                allowed=cursor.identity,
                hint="the same data.*, or a new run.name that starts from the checkpoint's weights",
            )
        if cursor.samples % self._data_size != 0:
            raise CheckpointError("the cursor stands inside a global batch", where="cursor", found=cursor.samples)
        for lane in self._lanes:
            self._check_place(lane, cursor.places.get(lane))
        self._places = {lane: cursor.places[lane] for lane in self._lanes}
        self._num_sequences = cursor.samples // self._data_size

    def _check_place(self, lane: int, place: Place | None) -> None:
        if place is None or place.position > self._order.lane_length(place.epoch, lane):
            raise CheckpointError(
                "the data cursor is damaged",
                where=f"cursor.places, lane {lane}",
                found="no place" if place is None else place,
            )

    def loader(self, *, micro_batch_size: int) -> StreamLoader:
        """Give micro batches, read ahead by `data.workers` processes."""
        return StreamLoader(self, micro_batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give one sequence after the other, read in this process."""
        for packed in self._packed(worker=0, num_workers=1):
            yield {name: rows[0] for name, rows in self._hand_out([packed]).items()}

    def _packed(self, worker: int, num_workers: int) -> Iterator[Packed]:
        """The share of one worker, which owns whole lanes: sequences worker, worker + num_workers, ... from here on."""
        lanes = {
            lane: Lane(self._corpus, self._tokenizer, self._order, lane=lane, place=place)
            for lane, place in self._places.items()
        }
        sequence = self._num_sequences + worker
        while True:
            lane = lanes[self._lanes[sequence % len(self._lanes)]]
            tokens = lane.next_sequence(self._config.sequence_length)
            yield self._lanes[sequence % len(self._lanes)], lane.place, tokens
            sequence += num_workers

    def _hand_out(self, packed: list[Packed]) -> dict[str, torch.Tensor]:
        """Stack sequences to a micro batch, and remember that they are gone."""
        for lane, place, _ in packed:
            self._places[lane] = place
        self._num_sequences += len(packed)
        rows = torch.from_numpy(np.stack([tokens for _, _, tokens in packed]).astype(np.int64))
        return dict(zip(NAMES, rows.unbind(1), strict=True))


class StreamLoader:
    """Iterate over micro batches of a stream: tensors of shape [micro_batch_size, sequence_length], int64."""

    def __init__(self, stream: TokenStream, micro_batch_size: int) -> None:
        self.dataset = stream
        self._micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Start the workers; they end with the iterator."""
        config = self.dataset._config
        num_workers = workers_that_fit(config.workers, len(self.dataset._lanes))
        sequences = iter(
            DataLoader(
                _Worker(self.dataset),
                batch_size=None,
                num_workers=num_workers,
                prefetch_factor=config.prefetch if num_workers else None,
                # As they are: numpy arrays travel through a pipe, tensors would each hold a file open.
                collate_fn=_as_it_is,
                # A generator of its own, so that dropout's random state is not touched.
                generator=torch.Generator(),
                multiprocessing_context="fork" if num_workers else None,
            )
        )
        while True:
            packed = []
            for _ in range(self._micro_batch_size):
                item = _next_item(sequences)
                if isinstance(item, HfdistError):
                    raise item
                packed.append(item)
            yield self.dataset._hand_out(packed)


class _Worker(IterableDataset[Any]):
    """What runs in a loader process. Errors for the reader travel as values, since torch would wrap them."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        try:
            yield from self._stream._packed(worker, num_workers)
        except HfdistError as error:
            yield error


def _next_item(sequences: Iterator[Any]) -> Any:
    try:
        return next(sequences)
    except RuntimeError as error:
        # torch has no class for it: `DataLoader worker (pid 1) is killed by signal` or `... exited unexpectedly`.
        if not str(error).startswith("DataLoader worker"):
            raise
        raise ResourceError(
            "a process that reads data ahead has died, often because memory ran out",
            where="data.workers",
            found=error,
            hint="more memory, a smaller data.prefetch, or data.workers=0",
        ) from error


def _as_it_is(item: Any) -> Any:
    return item


def _identity(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """Hash of all that decides which token stands where."""
    settings = [config.sequence_length, config.packing.value, config.seed, config.lanes]
    identity = json.dumps([1, corpus.fingerprint, tokenizer_digest(tokenizer), *settings])
    return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
