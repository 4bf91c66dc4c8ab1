"""Which documents of a pool come next in a lane, epoch after epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hfdist.data.corpus import Pool
from hfdist.data.cursor import Place
from hfdist.data.order import LaneOrder
from hfdist.errors import DataError

# What may pass without a document to train on: a short lane may draw only held-out ones, another a damaged file.
_MOST_BARREN_EPOCHS, _MOST_BARREN_DOCUMENTS = 10, 1000


class Walk:
    """A lane's way through a pool.

    Args:
        pool: the documents.
        order: of the pool.
        lane: number of the lane.
        place: where to begin; its offset is of the first document.
    """

    def __init__(self, pool: Pool, order: LaneOrder, lane: int, place: Place) -> None:
        self._pool, self._order, self.lane = pool, order, lane
        self._place = place
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
        """Canonical numbers of the next ones, one or more; none: the last epoch has ended.

        Raises:
            DataError: there is nothing to train on.
        """
        if not len(self._numbers):
            self._find(most)
        return self._numbers[:most]

    def go_on(self, num_documents: int, num_barren: int) -> Place:
        """Pass by documents that `rest_of_block` or `next_documents` has given.

        Args:
            num_documents: how many.
            num_barren: how many of them stand behind the last one to train on.

        Returns:
            Where the first of them stands.
        """
        place, self._numbers = self._place, self._numbers[num_documents:]
        self._place = Place(place.epoch, place.position + num_documents)
        if num_barren < num_documents:
            self._barren_epochs, self._barren_documents = -1, 0
        self._barren_documents += num_barren
        return place

    def _find(self, most: int) -> None:
        """Numbers of the next blocks, as far as they have so many documents, and of one at least."""
        limit = self._pool.epochs
        while limit is None or self._place.epoch < limit:
            epoch, position, _ = self._place
            if position < self._order.lane_length(epoch, self.lane):
                self._numbers = self._order.rest_of_blocks(epoch, self.lane, position, most)
                return
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._place = Place(self._place.epoch + 1)
        self._barren_epochs += 1
        is_endless = self._pool.epochs is None
        is_barren = self._barren_epochs >= _MOST_BARREN_EPOCHS and self._barren_documents >= _MOST_BARREN_DOCUMENTS
        if is_endless and is_barren:
            raise DataError(
                "a lane has no training documents",
                where=f"lane {self.lane}, {self._pool.name}",
                hint="fewer data.lanes",
            )
