"""The training stream of a data rank: its share of the run's sequences, in the run's one order, and batches of them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, Packing
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.image_reader import ImageReader
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.records import numbers_of
from hfdist.data.packing.packed_images import packed_row, stack_packed_rows
from hfdist.data.packing.sequence import (
    NAMES,
    ORIGINS,
    POSITION_IDS,
    PackedSequence,
    collate,
    image_row,
    origins_of,
    stack,
    stack_rows,
)
from hfdist.data.stream.lane import LaneSequence, open_lanes, open_turns
from hfdist.data.stream.lane_plan import identity_of, make_plan
from hfdist.data.stream.position import Reader, StreamPosition
from hfdist.data.stream.read_ahead import read_ahead
from hfdist.data.tokenization.encoders import Encoders, check_token_sources
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError

DOCUMENTS = "documents"
"""Key in a batch, with `data.keep_columns`, of the canonical number of each row's document; -1: none; shape [rows]."""


class TokenStream(StreamPosition, IterableDataset[dict[str, torch.Tensor]]):
    """The sequences of one data rank: input_ids, position_ids and labels of shape [sequence_length], int64.

        sequences of the run      0  1  2  3  4  5       with 2 data ranks
        data rank 1                  0     1     2       sequence s of rank r is sequence s * data_size + r of the run

    If several runs share the lanes, `deal` says which run reads which. If every source has a limit of epochs, the
    stream ends once all documents of this rank's lanes were given. Under `data.packing=none` a sequence is one
    document, with attention_mask in place of position_ids. With images a batch also has the tensors of the images that
    a forward takes, and position_ids may be those of `stack_packed_rows`.

    Args:
        corpus: the documents.
        tokenizer: must have an end-of-text token.
        config: `data.*`.
        data_rank: the number of this process among the data ranks.
        data_size: the number of data ranks; divides the lanes.
        global_batch_size: sequences in a step of all runs together, by which `data.anneal` counts.
        run: the number of this run, and how many runs share the lanes.

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
            # A run with images has chosen its packing already, by whether the model can take packed rows with images.
            config = replace(config, packing=Packing.best_fit)
        self.config, self._encoders = config, Encoders.of(tokenizer, config)
        check_token_sources(config.sources, self._encoders)
        super().__init__(
            corpus,
            make_plan(corpus, tokenizer, config, global_batch_size),
            identity_of(corpus, self._encoders, config, global_batch_size),
            num_lanes=config.lanes,
            reader=Reader(data_rank, data_size, *run),
            global_batch_size=global_batch_size,
        )
        self.images: ImageTokens | None = None
        """What images of rows become, set by `read_images`; None: rows have no images."""
        self.needs_image = False
        """Whether a batch without an image gets a small one, from which nothing is learned."""
        self.tells_images_by_row = False
        """Whether a batch says how much of each image tensor belongs to which row, so that it can be cut by rows."""
        self.decodes = True
        """Whether sequences come with the tensors of their images; to count sequences, none are needed."""
        self.tells_images = False
        """Whether a batch says which images its documents have, by hashes under the key `IMAGE_DIGESTS`."""
        self.tells_origins = False
        """Whether a batch says of which documents it is made, for values that are drawn by document and epoch."""

    def read_images(self, images: ImageTokens | None) -> TokenStream:
        """Let rows have images, before anything is read; None changes nothing. Returns this stream."""
        if images is not None:
            self.images, self._encoders = images, self._encoders.with_images(images)
            self.identity = identity_of(self.corpus, self._encoders, self.config, self._global_batch_size)
            self._stand_at(self._beginning(0))
        return self

    @property
    def may_lack_targets(self) -> bool:
        """Whether a batch may have no target: a source ends, documents are quarantined, or pieces are context."""
        has_limit = any(pool.epochs is not None for pool in self.corpus.pools)
        return self.corpus.has_examples or bool(self.corpus.quarantined) or has_limit

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
        """Give one sequence after the other, read in this process; a worker of a torch DataLoader gives its share.

        ConfigError: the workers of the DataLoader do not divide the lanes.
        """
        worker, num_workers = 0, 1
        if (info := get_worker_info()) is not None:
            worker, num_workers = info.id, info.num_workers
        if len(self.lanes) % num_workers != 0:
            raise ConfigError(
                "the workers of the DataLoader do not divide the lanes of this data rank",
                where="num_workers",
                found=f"{num_workers}, with {len(self.lanes)} lanes",
                hint="stream.loader(batch_size=...), which reads ahead with data.workers processes",
            )
        # Lanes in a row that gave no sequence. A worker of a DataLoader knows only its own lanes, so that `has_ended`,
        # which looks at all of them, would stay false.
        num_ended = 0
        for packed in self.packed(worker, num_workers):
            num_ended = 0 if packed.pool is not None else num_ended + 1
            if num_ended == len(self.lanes) // num_workers:
                return
            batch = self.next_batch([packed])
            if packed.pool is not None:
                yield {name: rows[0] for name, rows in batch.items()}

    def packed(self, worker: int, num_workers: int) -> Generator[LaneSequence]:
        """Give sequences worker, worker + num_workers, ... from here on; num_workers divides the lanes of this rank."""
        states = self._states_of_worker(worker, num_workers)
        lanes = open_lanes(self.plan, self._open_documents(), {lane: state.pools for lane, state in states.items()})
        reader = None
        if self.images is not None and self.decodes:
            reader = ImageReader(self.corpus, self.images, self.config)
        for turn in itertools.count():
            for number, lane in lanes.items():
                # The sample's number in the run: lanes take turns, and each has given so many sequences.
                sample = (states[number].sequences + turn) * self.config.lanes + number
                packed = lane.next(sample)
                yield packed if reader is None else packed._replace(sequence=reader.read(packed.sequence))

    def _open_documents(self) -> Documents:
        """Open the documents of this process, with the cache of their tokens."""
        return Documents(self.corpus, self._encoders, open_token_cache(self.config), self.config)

    def batches_in_turn(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Give batches from here on, faster than `next_batch` and the same; only where `plan.has_even_turns`."""
        places = {lane: state.pools[0].place for lane, state in self._states_of_worker(0, 1).items()}
        if self.ledger is not None:
            self.ledger.before_count = self._catch_up
        for sequences in open_turns(self.plan, self._open_documents(), places, batch_size):
            self._catch_up()
            self._in_turn = sequences
            while (pieces := sequences.next(batch_size)) is not None:
                self._count(batch_size)
                yield stack(pieces, self.plan.shape)

    def next_batch(self, packed: list[LaneSequence]) -> dict[str, torch.Tensor]:
        """Stack sequences to a batch, and advance the cursor and the ledger past them."""
        for lane_sequence in packed:
            self._go_past(lane_sequence)
        self._count(len(packed))
        sequences = [lane_sequence.sequence for lane_sequence in packed]
        batch = self._collate(sequences)
        if self.config.keep_columns and self.plan.packing is Packing.none:
            # A row is one document; a row of a lane that has ended is none.
            numbers = [next(iter(numbers_of(sequence.records)), -1) for sequence in sequences]
            batch[DOCUMENTS] = torch.tensor(numbers)
        if self.tells_origins:
            batch[ORIGINS] = origins_of(sequences)
        return batch

    def _collate(self, sequences: list[PackedSequence]) -> dict[str, torch.Tensor]:
        """Make the tensors of a batch, by how the run packs and whether its rows have images."""
        if self.images is None:
            return collate(sequences, self.plan.packing, self.plan.shape)
        if self.plan.packing is Packing.none:
            return self.stack_rows([image_row(one, self.images) for one in sequences])
        return self.stack_rows([packed_row(one, self.images, tells_images=self.tells_images) for one in sequences])

    def stack_rows(self, rows: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Stack rows of `image_row` or of `packed_row`, all of the same kind; also those of the held-out set.

        ValueError: the stream has no images.
        """
        if self.images is None:
            raise ValueError("stack_rows needs the images that read_images sets")
        # Only rows of several documents have positions.
        is_packed = NAMES[POSITION_IDS] in rows[0]
        stack_images_and_rows = stack_packed_rows if is_packed else stack_rows
        return stack_images_and_rows(
            rows,
            self.plan.shape.fill_id,
            self.images,
            needs_image=self.needs_image,
            tells_rows=self.tells_images_by_row,
        )


class StreamLoader:
    """An endless iterable over batches of a stream: tensors of shape [batch_size, sequence_length], int64.

    It never ends, so that ranks whose lanes end earlier keep in step with the others: a sequence of a lane that has
    ended has no targets. The data end when `stream.has_ended` is true on all ranks. A batch without targets does not
    say so: its lanes may have ended early, or its rows may be taken out.

    Args:
        stream: the stream; its place moves on with each batch.
        batch_size: sequences in a batch.
    """

    def __init__(self, stream: TokenStream, batch_size: int) -> None:
        self.dataset, self._batch_size = stream, batch_size

    def __iter__(self) -> Generator[dict[str, torch.Tensor]]:
        """Start the workers, which end with the iterator."""
        batches, num_deals = self._batches(), self.dataset.num_deals
        try:
            while True:
                if self.dataset.num_deals != num_deals:
                    # The sequences that were read ahead belong to lanes that other runs read by now.
                    batches.close()
                    batches, num_deals = self._batches(), self.dataset.num_deals
                yield next(batches)
        finally:
            # Ends the workers now: an error would hold them until garbage is collected, and that takes five seconds.
            batches.close()

    def _batches(self) -> Generator[dict[str, torch.Tensor]]:
        """Give batches of the lanes that this data rank has now."""
        num_workers = workers_that_fit(self.dataset.config.workers, len(self.dataset.lanes))
        if num_workers == 0 and self.dataset.plan.has_even_turns and not self.dataset.tells_origins:
            yield from self.dataset.batches_in_turn(self._batch_size)
        with contextlib.closing(self._sequences(num_workers)) as sequences:
            while True:
                yield self.dataset.next_batch([next(sequences) for _ in range(self._batch_size)])

    def _sequences(self, num_workers: int) -> Generator[LaneSequence]:
        """Give all sequences of this data rank in order, read by so many workers; with 0, by this process."""
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


def workers_that_fit(most_workers: int, rank_lanes: int) -> int:
    """Give the largest number of workers, up to `most_workers`, that divides the lanes of a rank; 0 of 0."""
    return max((n for n in range(1, most_workers + 1) if rank_lanes % n == 0), default=0)
