"""One lane: an endless run of packed sequences that can start at any place."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.data.corpus import Corpus
from hfdist.data.cursor import Place
from hfdist.data.order import LaneOrder
from hfdist.data.pack import empty_sequence, put
from hfdist.data.tokenize import encode
from hfdist.errors import CheckpointError, DataError

# Epochs that may pass without one training document: a lane may draw only held-out or empty ones for a while.
_MOST_BARREN_EPOCHS = 100


class Lane:
    """Reads, tokenizes and packs the documents of one lane in their order."""

    def __init__(
        self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, order: LaneOrder, *, lane: int, place: Place
    ) -> None:
        self._corpus, self._tokenizer, self._order = corpus, tokenizer, order
        self._lane = lane
        self.place = place
        """Where the next sequence begins."""
        self._tokens: NDArray[np.int32] | None = None
        # Texts from `place` on that were read together; they end within a block, hence within an epoch.
        self._ahead: deque[str] = deque()

    def next_sequence(self, length_tokens: int) -> NDArray[np.int32]:
        """Give the next sequence, shape [3, length], and move `place` behind it."""
        sequence, filled = empty_sequence(length_tokens), 0
        while filled < length_tokens:
            tokens = self._current()
            taken = put(sequence, filled, tokens, self.place.offset)
            filled += taken
            self.place = self.place._replace(offset=self.place.offset + taken)
            if self.place.offset == len(tokens):
                self._advance()
        return sequence

    def _current(self) -> NDArray[np.int32]:
        """Tokens of the document at `place`, moving on from documents that give none."""
        last_epoch = self.place.epoch + _MOST_BARREN_EPOCHS
        while self._tokens is None:
            if self.place.position >= self._order.lane_length(self.place.epoch, self._lane):
                self.place = Place(epoch=self.place.epoch + 1)
            if self.place.epoch > last_epoch:
                raise DataError("a lane has no training documents", where=f"lane {self._lane}", hint="fewer data.lanes")
            text = self._text()
            tokens = None if self._corpus.is_held_out(text) else encode(self._tokenizer, text)
            num_tokens = 0 if tokens is None else len(tokens)
            if self.place.offset > 0 and self.place.offset >= num_tokens:
                raise CheckpointError(
                    "the data cursor stands behind the end of a document: the data have changed, or it is damaged",
                    where=f"cursor.places, lane {self._lane}",
                    found=f"token {self.place.offset} of {num_tokens}",
                    hint="the data of the checkpoint, or a new run.name",
                )
            if num_tokens == 0:
                self._advance()
            else:
                self._tokens = tokens
        return self._tokens

    def _text(self) -> str:
        if not self._ahead:
            place = self.place
            self._ahead.extend(self._corpus.texts(self._order.neighbours(place.epoch, self._lane, place.position)))
        return self._ahead[0]

    def _advance(self) -> None:
        self._tokens = None
        self._ahead.popleft()
        self.place = Place(self.place.epoch, self.place.position + 1)
