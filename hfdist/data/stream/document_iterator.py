"""Which documents of a pool come next in a lane, epoch after epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.corpus import Pool
from hfdist.data.order.cursor import Place
from hfdist.data.order.shuffle import LaneOrder
from hfdist.errors import DataError

# What may pass without a document to train on: a short lane may draw only held-out ones, another a damaged file.
_MOST_BARREN_EPOCHS, _MOST_BARREN_DOCUMENTS = 10, 1000


class DocumentIterator:
    """A lane's way through a pool.

    Args:
        pool: the documents.
        order: of the pool.
        lane: number of the lane.
        place: where to begin; its offset is of the first document.
    """

    def __init__(self, pool: Pool, order: LaneOrder, lane: int, place: Place) -> None:
        self._pool, self._order, self._lane = pool, order, lane
        self.place = place
        """Of the next document."""
        self._barren_epochs = self._barren_documents = 0
        self._numbers = np.empty(0, dtype=np.int64)
        """Of documents behind the place, of the same epoch."""

    def rest_of_block(self) -> NDArray[np.int64]:
        """Canonical numbers of the next documents, which are read together; none: the last epoch has ended.

        Raises:
            DataError: there is nothing to train on.
        """
        if not len(self._numbers):
            self._find(1)
        return self._numbers

    def next_documents(self, most: int) -> NDArray[np.int64]:
        """Canonical numbers of the next ones, one or more; none: the last epoch has ended. They stay the next ones.

        Raises:
            DataError: there is nothing to train on.
        """
        if not len(self._numbers):
            self._find(most)
        return self._numbers[:most]

    def go_on(self, num_documents: int, num_barren: int) -> None:
        """Pass by documents that `rest_of_block` or `next_documents` has given.

        Args:
            num_documents: how many.
            num_barren: how many of them stand behind the last one to train on.
        """
        self._numbers = self._numbers[num_documents:]
        self.place = Place(self.place.epoch, self.place.position + num_documents)
        if num_barren < num_documents:
            self._barren_epochs, self._barren_documents = -1, 0
        self._barren_documents += num_barren

    def _find(self, most: int) -> None:
        """Numbers of the next blocks, as far as they have so many documents, and of one at least; kept until used."""
        limit = self._pool.epochs
        while limit is None or self.place.epoch < limit:
            epoch, position, _ = self.place
            if position < self._order.lane_length(epoch, self._lane):
                self._numbers = self._order.rest_of_blocks(epoch, self._lane, position, most)
                return
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Go on to the next epoch; after an error the place is as it was, so that the next call gives the same one."""
        num_barren = self._barren_epochs + 1
        is_barren = num_barren >= _MOST_BARREN_EPOCHS and self._barren_documents >= _MOST_BARREN_DOCUMENTS
        if self._pool.epochs is None and is_barren:
            raise DataError(
                "a lane has no training documents",
                where=f"lane {self._lane}, {self._pool.name}",
                hint="fewer data.lanes",
            )
        self.place, self._barren_epochs = Place(self.place.epoch + 1), num_barren
