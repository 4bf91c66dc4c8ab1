"""One lane: an endless run of packed sequences that can start at any place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.data.corpus import Corpus
from hfdist.data.cursor import Place
from hfdist.data.order import LaneOrder
from hfdist.data.pack import empty_sequence, put
from hfdist.data.tokenize import encode
from hfdist.errors import DataError

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
            document = self._order.document(self.place.epoch, self._lane, self.place.position)
            text = self._corpus.text(document)
            tokens = None if self._corpus.is_held_out(text) else encode(self._tokenizer, text)
            if tokens is None or len(tokens) == 0:
                self._advance()
            else:
                self._tokens = tokens
        return self._tokens

    def _advance(self) -> None:
        self._tokens = None
        self.place = Place(self.place.epoch, self.place.position + 1)
