"""Documents end to end, cut at the length: no filling, and a document may go on in the next sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hfdist.data.cursor import Place
from hfdist.data.packing.sequence import (
    IGNORED,
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    Placed,
    Sequence,
    Shape,
    assemble,
    ids_and_labels,
    problems_of,
)
from hfdist.data.records import RECORD, Fate, Records
from hfdist.errors import CheckpointError

# Cut together: twice as many each time, so that the first one comes soon and numpy's calls become cheap.
_MOST_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class _Item:
    """What is left of a document; nothing of one that is passed over."""

    placed: Placed
    first: int
    length: int


def concat(portions: Iterator[list[Placed]], offset: int, shape: Shape) -> Iterator[Sequence]:
    """Give sequences; the last one, where the documents end, is filled up.

    Args:
        portions: documents in order.
        offset: first token of the first document that is still to be used.
        shape: of sequences.

    Raises:
        CheckpointError: `offset` is behind the end of the document.
    """
    waiting: list[_Item] = []
    num_tokens, num_together = 0, 1
    for portion in portions:
        items = [_Item(placed, 0, len(placed.document.tokens)) for placed in portion]
        if offset > 0:
            items[0] = _begin_inside(items[0], offset)
            offset = 0
        waiting += items
        num_tokens += sum(item.length for item in items)
        while num_tokens >= num_together * shape.length:
            num_sequences = min(num_tokens // shape.length, _MOST_SEQUENCES)
            taken, waiting = _split(waiting, num_sequences * shape.length)
            num_tokens -= num_sequences * shape.length
            yield from _cut(taken, num_sequences, shape)
            num_together = min(2 * num_together, _MOST_SEQUENCES)
    if num_sequences := num_tokens // shape.length:
        taken, waiting = _split(waiting, num_sequences * shape.length)
        yield from _cut(taken, num_sequences, shape)
    if waiting:
        last = waiting[-1].placed
        pieces = [(item.placed, item.first, item.length) for item in waiting if item.length]
        passed = [item.placed for item in waiting if not item.length]
        yield assemble(pieces, passed, shape, Place(last.epoch, last.position + 1))


def _begin_inside(item: _Item, offset: int) -> _Item:
    if offset >= item.length:
        raise CheckpointError(
            "the data cursor stands behind the end of a document: the data have changed, or it is damaged",
            where="cursor.places",
            found=f"token {offset} of {item.length}",
            hint="the data of the checkpoint, or a new run.name",
        )
    return replace(item, first=offset, length=item.length - offset)


def _split(items: list[_Item], num_tokens: int) -> tuple[list[_Item], list[_Item]]:
    """The first `num_tokens`, and the rest. What is passed over behind the last token is for the rest."""
    filled = 0
    for place, item in enumerate(items):
        filled += item.length
        if filled >= num_tokens:
            over = filled - num_tokens
            rest = items[place + 1 :]
            if over:
                rest.insert(0, replace(item, first=item.first + item.length - over, length=over))
            return [*items[:place], replace(item, length=item.length - over)], rest
    raise AssertionError("there are fewer tokens than were counted")


def _cut(items: list[_Item], num_sequences: int, shape: Shape) -> Iterator[Sequence]:
    """Cut items that are `num_sequences * shape.length` tokens together."""
    lengths = np.array([item.length for item in items])
    ends = np.cumsum(lengths)
    rows = _rows(items, ends - lengths, num_sequences, shape)
    records, starts = _records(items, ends, num_sequences, shape.length)
    edges = np.arange(num_sequences + 1) * shape.length
    cuts = np.searchsorted(starts, edges)
    # The item that holds the last token of each sequence.
    lasts = np.searchsorted(ends, edges[1:] - 1, side="right").tolist()
    passed = [(end, item.placed) for end, item in zip(ends.tolist(), items, strict=True) if item.placed.document.error]
    for number, last in enumerate(lasts):
        item = items[last]
        used = item.first + item.length - int(ends[last] - edges[number + 1])
        place = Place(item.placed.epoch, item.placed.position, used)
        if used == len(item.placed.document.tokens):
            place = Place(place.epoch, place.position + 1)
        problems = problems_of([placed for end, placed in passed if end // shape.length == number]) if passed else ()
        yield Sequence(rows[number], place, shape.length, records[cuts[number] : cuts[number + 1]], problems)


def _rows(items: list[_Item], starts: NDArray[np.int64], num_sequences: int, shape: Shape) -> NDArray[np.int32]:
    """Shape [sequences, 3, length]."""
    parts = [item.placed.document.tokens[item.first : item.first + item.length] for item in items if item.length]
    num_tokens = num_sequences * shape.length
    ids, labels = ids_and_labels(np.concatenate(parts, dtype=np.int32, casting="unsafe"))
    places = np.arange(num_tokens, dtype=np.int32)
    begin = np.zeros(num_tokens, dtype=np.int32)
    for item, start in zip(items, starts.tolist(), strict=True):
        if item.length:
            begin[start] = start
            labels[start] = IGNORED
            if item.placed.document.fate is Fate.quarantined:
                ids[start : start + item.length] = shape.fill_id
                labels[start : start + item.length] = IGNORED
    begin[:: shape.length] = places[:: shape.length]
    labels[:: shape.length] = IGNORED
    positions = places - np.maximum.accumulate(begin)
    rows = np.empty((num_sequences, 3, shape.length), dtype=np.int32)
    for row, values in ((INPUT_IDS, ids), (POSITION_IDS, positions), (LABELS, labels)):
        rows[:, row] = values.reshape(num_sequences, shape.length)
    return rows


def _records(
    items: list[_Item], ends: NDArray[np.int64], num_sequences: int, length: int
) -> tuple[Records, NDArray[np.int64]]:
    """Records of all sequences, and at which token each piece starts."""
    lengths = np.diff(ends, prepend=0)
    starts = ends - lengths
    # Pieces begin where documents do and where sequences do; what is passed over lies between them.
    edges = np.arange(num_sequences) * length
    holders = np.searchsorted(ends, edges, side="right")
    is_inside = starts[holders] != edges
    owner = np.concatenate([np.arange(len(items)), holders[is_inside]])
    start = np.concatenate([starts, edges[is_inside]])
    is_piece = lengths[owner] > 0
    order = np.lexsort((is_piece, start))
    owner, start, is_piece = owner[order], start[order], is_piece[order]
    stop = np.minimum(ends[owner], (start // length + 1) * length)
    records = np.zeros(len(owner), dtype=RECORD)
    of_item = np.array(
        [
            (document.number, item.first, len(document.tokens) + document.cut_tokens, item.placed.epoch, document.fate)
            for item in items
            for document in (item.placed.document,)
        ],
        dtype=np.int64,
    )[owner]  # fmt: skip
    records["document"], records["of_tokens"] = of_item[:, 0], of_item[:, 2]
    records["epoch"], records["fate"] = of_item[:, 3], of_item[:, 4]
    records["num_tokens"] = np.where(is_piece, stop - start, 0)
    records["first_token"] = np.where(is_piece, of_item[:, 1] + start - starts[owner], 0)
    return records, start
