"""Packing that looks at several documents before it makes sequences of them: whole documents, or one each.

A window begins at a document and ends by rules that depend on that document only, so that a cursor of two numbers,
where the window begins and which of its sequences is next, finds the place again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hfdist.data.cursor import Place
from hfdist.data.order import permutation
from hfdist.data.packing.sequence import Placed, Sequence, Shape, assemble
from hfdist.errors import CheckpointError

# Windows of best_fit grow, so that a first batch comes soon and the filling of last sequences becomes rare.
_LEAST_DOCUMENTS, _MOST_DOCUMENTS = 64, 1024
_MOST_SEQUENCES = 512
# Documents that `none` sorts by length.
_SORTED_DOCUMENTS = 64
_ROUNDED_TOKENS = 8
_START = Place()

Pieces = list[tuple[Placed, int, int]]
"""Documents of one sequence, each with its first token and number of tokens."""


@dataclass
class _Window:
    """Neighbouring documents of one lane and epoch."""

    documents: list[Placed] = field(default_factory=list)
    """Those that give tokens."""
    passed: list[Placed] = field(default_factory=list)
    num_tokens: int = 0
    first_position: int = 0
    next_place: Place = _START

    def add(self, placed: Placed) -> None:
        if not self.num_documents:
            self.first_position = placed.position
        (self.documents if len(placed.document.tokens) else self.passed).append(placed)
        self.num_tokens += len(placed.document.tokens)
        self.next_place = Place(placed.epoch, placed.position + 1)

    @property
    def num_documents(self) -> int:
        return len(self.documents) + len(self.passed)


def best_fit(
    portions: Iterator[list[Placed]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Pack whole documents, each where it leaves least room; only one longer than a sequence is cut.

    Args:
        portions: documents in order, from the beginning of a window on.
        first: sequence of that window to begin with.
        shape: of sequences.
        key: of the order of a window's sequences.
    """

    def is_full(window: _Window) -> bool:
        most = min(max(window.first_position, _LEAST_DOCUMENTS), _MOST_DOCUMENTS)
        return window.num_documents >= most or window.num_tokens >= _MOST_SEQUENCES * shape.length

    def arrange(window: _Window, epoch: int) -> list[Pieces]:
        bins = fill_bins(window.documents, shape.length)
        order = permutation(len(bins), *key, epoch, window.first_position, "bins")
        return [sorted(bins[place], key=lambda piece: (piece[0].position, piece[1])) for place in order.tolist()]

    return _give(_windows(portions, is_full), arrange, first, shape)


def one_each(
    portions: Iterator[list[Placed]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Give each document by itself, cut off at the length, in an order in which all lanes have like lengths at a time.

    Args:
        portions: documents in order, from the beginning of a window on.
        first: sequence of that window to begin with.
        shape: of sequences.
        key: of the order of lengths; the same in all lanes.
    """

    def is_full(window: _Window) -> bool:
        return len(window.documents) >= _SORTED_DOCUMENTS

    def arrange(window: _Window, epoch: int) -> list[Pieces]:
        by_length = sorted(window.documents, key=lambda placed: (len(placed.document.tokens), placed.position))
        # All lanes take the same quantile at the same time.
        order = permutation(_SORTED_DOCUMENTS, *key, epoch, "lengths").tolist()
        slots = {place * _SORTED_DOCUMENTS // len(by_length): placed for place, placed in enumerate(by_length)}
        return [[(slots[n], 0, min(len(slots[n].document.tokens), shape.length))] for n in order if n in slots]

    return _give(_windows(portions, is_full), arrange, first, shape, fits_length=True)


def fill_bins(documents: list[Placed], length: int) -> list[Pieces]:
    """Best fit decreasing: the longest piece first, each into the fullest sequence that still has room for it."""
    pieces = [
        (placed, first, min(length, len(placed.document.tokens) - first))
        for placed in documents
        for first in range(0, len(placed.document.tokens), length)
    ]
    pieces.sort(key=lambda piece: -piece[2])
    bins: list[Pieces] = []
    room: list[int] = []
    """Sizes of the room that sequences have left, rising; each once."""
    with_room: dict[int, list[int]] = {}
    for piece in pieces:
        at = bisect.bisect_left(room, piece[2])
        if at == len(room):
            bins.append([piece])
            _offer(len(bins) - 1, length - piece[2], room, with_room)
            continue
        left = room[at]
        number = with_room[left].pop()
        if not with_room[left]:
            del room[at]
        bins[number].append(piece)
        _offer(number, left - piece[2], room, with_room)
    return bins


def _offer(number: int, left: int, room: list[int], with_room: dict[int, list[int]]) -> None:
    if left == 0:
        return
    if not with_room.get(left):
        bisect.insort(room, left)
    with_room.setdefault(left, []).append(number)


def _windows(portions: Iterator[list[Placed]], is_full: Callable[[_Window], bool]) -> Iterator[_Window]:
    """Cut a run of documents; a window ends with its epoch."""
    window = _Window()
    for portion in portions:
        for placed in portion:
            if window.num_documents and window.next_place.epoch != placed.epoch:
                yield window
                window = _Window()
            window.add(placed)
            if is_full(window):
                yield window
                window = _Window()
    if window.num_documents:
        yield window


def _give(
    windows: Iterator[_Window],
    arrange: Callable[[_Window, int], list[Pieces]],
    first: int,
    shape: Shape,
    *,
    fits_length: bool = False,
) -> Iterator[Sequence]:
    """Give the sequences of windows; what a window passes over goes with its first one, or with the next window's."""
    passed: list[Placed] = []
    for window in windows:
        epoch = window.next_place.epoch
        sequences = arrange(window, epoch)
        if first == 0:
            passed += window.passed
        elif first >= len(sequences):
            raise CheckpointError(
                "the data cursor stands behind the end of a window: the data have changed, or it is damaged",
                where="cursor.places",
                found=f"sequence {first} of {len(sequences)}",
                hint="the data of the checkpoint, or a new run.name",
            )
        for number in range(first, len(sequences)):
            is_last = number == len(sequences) - 1
            place = window.next_place if is_last else Place(epoch, window.first_position, number + 1)
            pieces = sequences[number]
            length = _rounded(sum(n for _, _, n in pieces), shape) if fits_length else None
            yield assemble(pieces, passed if number == 0 else [], shape, place, length=length)
            if number == 0:
                passed = []
        first = 0
    if passed:
        length = _rounded(1, shape) if fits_length else None
        yield assemble([], passed, shape, Place(passed[-1].epoch, passed[-1].position + 1), length=length)


def _rounded(num_tokens: int, shape: Shape) -> int:
    return min(-(-num_tokens // _ROUNDED_TOKENS) * _ROUNDED_TOKENS, shape.length)
