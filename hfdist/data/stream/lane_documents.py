"""The documents of one pool in the order of one lane, epoch after epoch, starting at any place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.corpus import Pool
from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Status
from hfdist.data.order.shuffle import LaneOrder
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import DataError

# A barren document is one that is not trained on. A lane gives up after so many barren epochs and documents in a row:
# a short lane may have only held-out documents, or one damaged file.
_MOST_BARREN_EPOCHS, _MOST_BARREN_DOCUMENTS = 10, 1000
_TIMES_AHEAD = 4
"""How many document numbers are worked out for each one that is needed: one call costs as much as hundreds of them."""


class DocumentIterator:
    """An iterator over the documents of a pool in a lane, epoch after epoch; it gives only their numbers.

    Args:
        pool: the documents, and how many epochs of them are read.
        order: the order of the pool's documents in each lane.
        lane: the number of the lane.
        place: the place of the first document.
    """

    def __init__(self, pool: Pool, order: LaneOrder, lane: int, place: Place) -> None:
        self._pool, self._order, self._lane = pool, order, lane
        self.place = place
        """The place of the next document; only the first place can have an offset."""
        self._barren_epochs = self._barren_documents = 0
        self._numbers = np.empty(0, dtype=np.int64)
        """Numbers of the documents from `place` on, all of one epoch; they may be fewer than the epoch has left."""

    def next_documents(self, most: int | None = None) -> NDArray[np.int64]:
        """Give the canonical numbers of the next documents, all of one epoch; a second call gives the same ones.

        Only `advance` moves on.

        Args:
            most: the largest number of documents to give, perhaps from several blocks; None: the rest of the block,
                whose documents are cheap to read together.

        Returns:
            The numbers, shape [documents]; none if the last epoch has ended.

        Raises:
            DataError: the lane has no document to train on.
        """
        limit = self._pool.epochs
        while not len(self._numbers) and (limit is None or self.place.epoch < limit):
            if self.place.position < self._order.lane_length(self.place.epoch, self._lane):
                self._numbers = self._after(0, most)
            else:
                self._end_epoch()
        if most is not None and 0 < len(self._numbers) < most:
            self._numbers = np.concatenate([self._numbers, self._after(len(self._numbers), most)])
        return self._numbers[:most]

    def _after(self, num_documents: int, most: int | None) -> NDArray[np.int64]:
        """Give numbers of this epoch that come `num_documents` after the place.

        They are a few times `most`, if there are as many; None: those up to the end of a block.
        """
        epoch, position = self.place.epoch, self.place.position + num_documents
        if position >= self._order.lane_length(epoch, self._lane):
            return self._numbers[:0]
        least = 1 if most is None else _TIMES_AHEAD * most
        return self._order.rest_of_blocks(epoch, self._lane, position, least)

    def advance(self, num_documents: int, num_barren: int) -> None:
        """Move past the next `num_documents`, of which the last `num_barren` are not trained on."""
        self._numbers = self._numbers[num_documents:]
        self.place = Place(self.place.epoch, self.place.position + num_documents)
        if num_barren < num_documents:
            # This epoch has a document to train on: its end, which adds one, counts no barren epoch.
            self._barren_epochs, self._barren_documents = -1, 0
        self._barren_documents += num_barren

    def _end_epoch(self) -> None:
        """Begin the next epoch; an error leaves the place as it was, so that the next call raises it again."""
        num_barren = self._barren_epochs + 1
        is_barren = num_barren >= _MOST_BARREN_EPOCHS and self._barren_documents >= _MOST_BARREN_DOCUMENTS
        if self._pool.epochs is None and is_barren:
            where = f"lane {self._lane}, {self._pool.name}"
            raise DataError("a lane has no training documents", where=where, hint="fewer data.lanes")
        self.place, self._barren_epochs = Place(self.place.epoch + 1), num_barren


def chunks_of(iterator: DocumentIterator, documents: Documents) -> Iterator[tuple[Place, DocumentBatch]]:
    """Give chunks of documents in a lane's order, epoch after epoch, each with the place of its first document."""
    while len(numbers := iterator.next_documents()):
        for chunk in documents.chunks(numbers):
            num_documents = len(chunk.numbers)
            trained = np.flatnonzero(chunk.fates == Status.trained)
            num_barren = num_documents - 1 - int(trained[-1]) if len(trained) else num_documents
            place = iterator.place
            iterator.advance(num_documents, num_barren)
            yield place, chunk
