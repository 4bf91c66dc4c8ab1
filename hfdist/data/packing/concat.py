"""Documents end to end, cut at the length: no filling, and a document may go on in the next sequence."""

from __future__ import annotations

from collections.abc import Iterator

from hfdist.data.order.cursor import Place
from hfdist.data.packing.packing_buffer import PackingBuffer, Share
from hfdist.data.packing.sequence import Sequence, Shape
from hfdist.data.sources.document_batch import DocumentBatch

# Cut together: twice as many each time, so that the first one comes soon and numpy's calls become cheap.
_MOST_SEQUENCES = 128


def concat(chunks: Iterator[tuple[Place, DocumentBatch]], shape: Shape) -> Iterator[Sequence]:
    """Give the sequences of one lane; the last one, where the documents end, is filled up.

    Args:
        chunks: documents in order, and the place of the first of them; its offset, of the first chunk only, is
            the first token that is still to be used.
        shape: of sequences.

    Raises:
        CheckpointError: that offset is behind the end of the document.
    """
    waiting, num_together, lane = PackingBuffer(shape, [0]), 1, 0

    def cut(most_sequences: int) -> Iterator[Sequence]:
        num_sequences = min(waiting.num_sequences(lane), most_sequences)
        return map(waiting.cut({lane: num_sequences}).sequence, range(num_sequences))

    for place, chunk in chunks:
        waiting.add(chunk, [Share(lane, place, len(chunk.numbers))])
        while waiting.num_sequences(lane) >= num_together:
            yield from cut(_MOST_SEQUENCES)
            num_together = min(2 * num_together, _MOST_SEQUENCES)
    if waiting.num_sequences(lane):
        yield from cut(_MOST_SEQUENCES)
    if waiting.num_documents(lane):
        yield waiting.rest(lane)
