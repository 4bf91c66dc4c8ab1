"""Packing by windows of neighbouring documents: whole documents together in a sequence, or each in one of its own.

documents     a bbb cc ddddd | e ff ggg ...      a window ends by rules that look only at its own documents
sequences     ddddd  bbbcc  a....                and at those after it
cursor        (begin of the window, number of its next sequence): these two numbers find the place again
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, Status, count_new_documents, join, make_records
from hfdist.data.order.shuffle import permutation
from hfdist.data.packing.sequence import (
    Integers,
    PackedSequence,
    Problem,
    Shape,
    after_the_end,
    filling,
    without_tokens,
)
from hfdist.data.sources.document_batch import DocumentBatch, slices

# Documents of a window of best_fit. Windows grow along an epoch: the first batch comes soon, and later few sequences
# are a window's last one, which is filled up.
_LEAST_DOCUMENTS, _MOST_DOCUMENTS = 64, 1024
_MOST_SEQUENCES = 512
"""Sequences of a window of best_fit, at most."""
_SORTED_DOCUMENTS = 64
"""Documents of a window of `one_each`, which it sorts by length."""
_ROUNDED_TOKENS = 8
"""The length of a sequence of one document is filled up to a multiple of this, which suits matrix units of GPUs."""


class _Arrangement(NamedTuple):
    """The pieces of a window's documents, in the order of its sequences."""

    pieces: DocumentPieces
    ends: Integers
    """End of each sequence, counted in pieces; shape [sequences]."""
    lengths: Integers
    """Number of tokens of each sequence, its filling included; at most `shape.length`. Shape [sequences]."""


class _WindowPlan(NamedTuple):
    """A window that has been chosen, and how its documents become sequences."""

    num_documents: int
    """Number of documents of the window."""
    arrangement: _Arrangement


class _Window(NamedTuple):
    """Neighbouring documents of one lane and epoch."""

    begin: Place
    """Place of the first of the documents."""
    next_place: Place
    """Place after the last of the documents."""
    documents: DocumentBatch
    arrangement: _Arrangement


_Arrange = Callable[[Integers, Place, bool], _WindowPlan | None]
"""Plans the next window: gets the sizes of the next documents, the place of the first, and whether the epoch has no
more; None: it needs more documents to tell where the window ends."""


def best_fit(
    chunks: Iterator[tuple[Place, DocumentBatch]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[PackedSequence]:
    """Pack whole documents, each where it leaves least room; only one longer than a sequence is cut.

    Args:
        chunks: documents in order from the beginning of a window on, each chunk of one epoch, with the place of its
            first document; the offset of a place does not count.
        first: number of the sequence in the first window to begin with.
        shape: the shape of a sequence.
        key: the key that decides, with the window's place, the order of a window's sequences.

    Returns:
        The sequences, each of `shape.length` tokens.
    """
    length = shape.length

    def arrange(sizes: Integers, begin: Place, is_all: bool) -> _WindowPlan | None:
        most = min(max(begin.position, _LEAST_DOCUMENTS), _MOST_DOCUMENTS)
        is_full = len(sizes) >= most or sizes.sum() >= _MOST_SEQUENCES * length
        if not is_full and not is_all:
            return None
        tokens = sizes[:most]
        last = int(np.searchsorted(np.cumsum(tokens), _MOST_SEQUENCES * length))
        fitted = fit(tokens[: last + 1], length, may_end_before=is_full)
        num_sequences = fitted.num_sequences
        rank = np.empty(num_sequences, dtype=np.int64)
        rank[permutation(num_sequences, *key, begin.epoch, begin.position, "bins")] = np.arange(num_sequences)
        rank_of_piece = rank[fitted.sequence]
        # Inside a sequence documents stay in order.
        order = np.argsort(rank_of_piece, kind="stable")
        ends = np.cumsum(np.bincount(rank_of_piece, minlength=num_sequences))
        pieces = DocumentPieces(*(column[order] for column in fitted.pieces))
        return _WindowPlan(fitted.num_documents, _Arrangement(pieces, ends, np.full(num_sequences, length)))

    return _sequences(_windows(chunks, arrange), first, shape, length)


def one_each(
    chunks: Iterator[tuple[Place, DocumentBatch]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[PackedSequence]:
    """Give each document as a sequence of its own, cut off at the length; all lanes have like lengths at a time.

    Args:
        chunks: documents, as `best_fit` takes them.
        first: number of the sequence in the first window to begin with.
        shape: the largest length of a sequence, and the token that fills up.
        key: the key that decides the order of lengths; it must be the same in all lanes.

    Returns:
        The sequences, each of its document's length, filled up to a multiple of 8 tokens.
    """

    def arrange(sizes: Integers, begin: Place, is_all: bool) -> _WindowPlan | None:
        with_tokens = np.flatnonzero(sizes)[:_SORTED_DOCUMENTS]
        is_full = len(with_tokens) == _SORTED_DOCUMENTS
        if not is_full and not is_all:
            return None
        tokens = sizes[with_tokens]
        by_length = np.argsort(tokens, kind="stable")
        # Slots are quantiles of the length: all lanes, also with fewer documents, take the same slot at the same time.
        slots = np.full(_SORTED_DOCUMENTS, -1)
        slots[np.arange(len(tokens)) * _SORTED_DOCUMENTS // max(len(tokens), 1)] = by_length
        order = slots[permutation(_SORTED_DOCUMENTS, *key, begin.epoch, "lengths")]
        order = order[order >= 0]
        used = np.minimum(tokens[order], shape.length)
        pieces = DocumentPieces(with_tokens[order], np.zeros_like(used), used)
        lengths = np.minimum(-(-used // _ROUNDED_TOKENS) * _ROUNDED_TOKENS, shape.length)
        num_documents = int(with_tokens[-1]) + 1 if is_full else len(sizes)
        return _WindowPlan(num_documents, _Arrangement(pieces, np.arange(len(used)) + 1, lengths))

    windows = _windows(chunks, arrange, _SORTED_DOCUMENTS)
    return _sequences(windows, first, shape, min(_ROUNDED_TOKENS, shape.length))


class _Pending:
    """A queue of neighbouring documents of one lane and epoch that are in no window yet."""

    def __init__(self) -> None:
        self.chunks: deque[tuple[Place, DocumentBatch]] = deque()
        self.num_with_tokens = 0

    def add(self, place: Place, chunk: DocumentBatch) -> None:
        """Add documents, whose first one stands at `place`, to the end."""
        self.chunks.append((place, chunk))
        self.num_with_tokens += int(np.count_nonzero(chunk.lengths))

    def take(self, num_documents: int) -> tuple[DocumentBatch, Place]:
        """Take the first documents; also returns the place after them."""
        taken, after = [], self.chunks[0][0]
        while num_documents:
            place, chunk = self.chunks.popleft()
            count = min(num_documents, len(chunk.numbers))
            after = Place(place.epoch, place.position + count)
            if count < len(chunk.numbers):
                self.chunks.appendleft((after, chunk.part(count, len(chunk.numbers))))
                chunk = chunk.part(0, count)
            taken.append(chunk)
            num_documents -= count
        joined = DocumentBatch.join(taken)
        self.num_with_tokens -= int(np.count_nonzero(joined.lengths))
        return joined, after


def _windows(chunks: Iterator[tuple[Place, DocumentBatch]], arrange: _Arrange, least: int = 0) -> Iterator[_Window]:
    """Split documents into windows. A window ends with its epoch, or has at least `least` documents with tokens."""
    pending = _Pending()

    def take(*, is_all: bool) -> Iterator[_Window]:
        # Documents without tokens do not count here: else they would be looked at again with each chunk that follows.
        while pending.chunks and (is_all or pending.num_with_tokens >= least):
            begin, _ = pending.chunks[0]
            sizes = np.concatenate([chunk.lengths for _, chunk in pending.chunks])
            plan = arrange(sizes, begin, is_all)
            if plan is None:
                return
            documents, next_place = pending.take(plan.num_documents)
            yield _Window(begin, next_place, documents, plan.arrangement)

    for place, chunk in chunks:
        if pending.chunks and pending.chunks[0][0].epoch != place.epoch:
            yield from take(is_all=True)
        if len(chunk.numbers):
            pending.add(place, chunk)
        yield from take(is_all=False)
    yield from take(is_all=True)


def _sequences(windows: Iterator[_Window], first: int, shape: Shape, last_length: int) -> Iterator[PackedSequence]:
    """Give the sequences of windows, from number `first` of the first window on.

    The records of documents that a window passes over go with its first sequence, or with that of the next window that
    has one. If none is left at the very end, they go with a sequence without tokens, of `last_length`.
    """
    passed: list[Records] = []
    problems: list[Problem] = []
    next_place = Place()
    for window in windows:
        documents, next_place, num_sequences = window.documents, window.next_place, len(window.arrangement.ends)
        if first > 0 and first >= num_sequences:
            raise after_the_end("window", f"sequence {first} of {num_sequences}")
        # A window that is begun in its middle has told of them before.
        if first == 0 and not documents.lengths.all():
            empty = np.flatnonzero(documents.lengths == 0)
            numbers, fates = documents.numbers[empty], documents.fates[empty]
            passed.append(make_records(len(empty), document=numbers, fate=fates, epoch=window.begin.epoch))
            errors = sorted(documents.errors.items())
            problems += [Problem(int(documents.numbers[place]), str(error)) for place, error in errors]
        if not num_sequences:
            continue
        made = _sequences_of(window, shape, first)
        if passed:
            with_passed = next(made)
            records = join([*passed, with_passed.records])
            num_documents = count_new_documents(records)
            yield with_passed._replace(records=records, num_documents=num_documents, problems=tuple(problems))
            passed, problems = [], []
        yield from made
        first = 0
    if passed:
        yield without_tokens(last_length, shape, next_place, join(passed), tuple(problems))


class _Parts(NamedTuple):
    """The parts of a window's sequences: its pieces, and the filling of each sequence with room; each of shape [parts].

    pieces    a a a | b b | c c c c       parts    a a a | b b . | c c c c       a sequence is filled up by one part
    """

    arrays: Integers
    """Number of the array that holds the part's tokens; the last array is filling."""
    starts: Integers
    """Index of the part's first token in that array."""
    sizes: Integers
    """Number of tokens of the part."""
    is_blank: Integers
    """1 where the tokens of the part are no targets."""


def _sequences_of(window: _Window, shape: Shape, first: int) -> Iterator[PackedSequence]:
    """Give the sequences of a window from number `first` on: all made together, which makes numpy's calls cheap.

    Documents that the window passes over have no records in them.
    """
    documents, (pieces, ends, lengths) = window.documents, window.arrangement
    owners = pieces.document
    records = make_records(
        len(owners),
        document=documents.numbers[owners],
        first_token=pieces.first_token,
        num_tokens=pieces.num_tokens,
        of_tokens=(documents.lengths + documents.cut_tokens)[owners],
        epoch=window.begin.epoch,
        fate=documents.fates[owners],
    )
    room = lengths - np.diff(np.cumsum(pieces.num_tokens)[ends - 1], prepend=0)
    filled = _fill_up(documents, window.arrangement, room)
    tokens = [*documents.tokens, filling(shape.length, shape)]
    parts = slices(tokens, filled.arrays, filled.starts, filled.sizes)
    filled_ends = ends + np.cumsum(room > 0)
    blanks = _blanks(filled, filled_ends, lengths)
    sizes, num_tokens = filled.sizes.tolist(), (lengths - room).tolist()
    part_ends, record_ends = [0, *filled_ends.tolist()], [0, *ends.tolist()]
    for number in range(first, len(ends)):
        own_parts = slice(part_ends[number], part_ends[number + 1])
        own_records = records[record_ends[number] : record_ends[number + 1]]
        is_last = number == len(ends) - 1
        yield PackedSequence(
            parts=parts[own_parts],
            lengths=sizes[own_parts],
            blanks=blanks[number],
            next_place=window.next_place if is_last else window.begin._replace(offset=number + 1),
            num_tokens=num_tokens[number],
            num_documents=count_new_documents(own_records),
            records=own_records,
        )


def _fill_up(documents: DocumentBatch, arrangement: _Arrangement, room: Integers) -> _Parts:
    """Give the parts of a window's sequences; `room` is how many tokens each sequence lacks, shape [sequences]."""
    pieces, has_room = arrangement.pieces, room > 0
    owners = pieces.document
    # Filling is one more array after those of the documents. It also stands for the tokens of quarantined documents.
    filling_array = len(documents.tokens)
    is_blank = documents.fates[owners] == Status.quarantined
    arrays = np.where(is_blank, filling_array, documents.arrays[owners])
    starts = np.where(is_blank, 0, documents.starts[owners] + pieces.first_token)
    of_pieces = np.stack(_Parts(arrays, starts, pieces.num_tokens, is_blank))
    missing = room[has_room]
    of_filling = np.stack(
        _Parts(np.full_like(missing, filling_array), np.zeros_like(missing), missing, np.ones_like(missing))
    )
    return _Parts(*np.insert(of_pieces, arrangement.ends[has_room], of_filling, axis=1))


def _blanks(parts: _Parts, ends: Integers, lengths: Integers) -> list[list[tuple[int, int]]]:
    """Give the begin and end of each stretch without targets, in tokens of its sequence, for each sequence.

    `ends` are the ends of the sequences, counted in parts, and `lengths` their tokens; both of shape [sequences].
    """
    sizes, is_blank = parts.sizes, parts.is_blank
    blanks: list[list[tuple[int, int]]] = [[] for _ in ends]
    places = np.flatnonzero(is_blank)
    sequence = np.searchsorted(ends, places, side="right")
    stops = np.cumsum(sizes)[places] - (np.cumsum(lengths) - lengths)[sequence]
    for number, stop, size in zip(sequence.tolist(), stops.tolist(), sizes[places].tolist(), strict=True):
        blanks[number].append((stop - size, stop))
    return blanks


RULE = 2
"""Version of the rules for where a window ends and what shares a sequence: cursors of different versions differ."""

_MOST_TRIES = 4
"""The most ends of one window that are tried."""
_ENOUGH = 512
"""No other end is tried once the room that is left over is at most one part of this many of the tokens."""
_SPARE = 1024
"""The first try leaves one part of this many of the tokens as room, as pieces do not fit together without any."""


class DocumentPieces(NamedTuple):
    """Documents cut to the length of a sequence, in the order of the documents; each field of shape [pieces]."""

    document: Integers
    """Number of the piece's document among the documents."""
    first_token: Integers
    """Place of the piece's first token in its document."""
    num_tokens: Integers
    """Number of tokens of the piece."""


class Filled(NamedTuple):
    """Sequences that `fill` has filled with pieces."""

    sequence: list[int]
    """Number of the sequence of each piece."""
    num_sequences: int
    most_room: int
    """The most tokens that one of the sequences lacks."""


class Fit(NamedTuple):
    """A window that `fit` has chosen."""

    num_documents: int
    """Number of documents of the window."""
    pieces: DocumentPieces
    """Pieces of these documents."""
    sequence: Integers
    """Number of the sequence of each piece; shape [pieces]."""
    num_sequences: int


def cut(sizes: Integers, length: int) -> DocumentPieces:
    """Cut documents into pieces of at most `length` tokens; an empty document gives none.

    `sizes` are the numbers of tokens of the documents; shape [documents].
    """
    counts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_token = number * length
    return DocumentPieces(document, first_token, np.minimum(sizes[document] - first_token, length))


def fill(lengths: list[int], length: int) -> Filled:
    """Put each piece into the fullest sequence that still has room for it; of equal ones into the youngest.

        length 6, pieces 4 3 2 2         4        4 3      42 3      42 32
        room left                        2        2 3       0 3       0 1

    Args:
        lengths: lengths of the pieces, falling, from `length` to 1 token.
        length: length of a sequence in tokens.
    """
    sequence: list[int] = []
    num_sequences = 0
    # The different numbers of tokens that sequences lack, rising; and the sequences that lack so many.
    room: list[int] = []
    with_room: dict[int, list[int]] = {}
    # Inside the loop nothing is called that is not C: it is half of what packing costs.
    find, insert, add = bisect.bisect_left, bisect.insort, sequence.append
    for num_tokens in lengths:
        at = find(room, num_tokens)
        if at == len(room):
            number, left = num_sequences, length - num_tokens
            num_sequences += 1
        else:
            space = room[at]
            same = with_room[space]
            number, left = same.pop(), space - num_tokens
            if not same:
                del room[at]
        add(number)
        if left:
            if left not in with_room:
                with_room[left] = [number]
                insert(room, left)
                continue
            same = with_room[left]
            if not same:
                insert(room, left)
            same.append(number)
    return Filled(sequence, num_sequences, most_room=room[-1] if room else 0)


def fit(sizes: Integers, length: int, *, may_end_before: bool) -> Fit:
    """Choose where a window ends, and fill sequences with its pieces.

    Sequences are full but for the last one if the tokens up to the end are a little less than a multiple of the length.
    So among the ends in the second half the one that leaves least room is taken, of a few that look best.

    Args:
        sizes: numbers of tokens of the documents that the window may have; shape [documents].
        length: length of a sequence in tokens.
        may_end_before: whether the window may end before the last document; else it has them all.
    """
    pieces = cut(sizes, length)
    falling = np.argsort(-pieces.num_tokens, kind="stable")
    # The number of pieces, and of tokens, of the first 1, 2, ... documents.
    num_pieces = np.searchsorted(pieces.document, np.arange(1, len(sizes) + 1))
    totals = np.cumsum(sizes)
    first_end = (len(sizes) + 1) // 2 if may_end_before else len(sizes)
    # The room in the last sequence for each end, if all others were full.
    room = -totals[first_end - 1 :] % length
    wanted_room = int(totals[-1]) // _SPARE
    best_share, best = -1.0, Fit(0, pieces, np.empty(0, dtype=np.int64), 0)
    for _ in range(min(_MOST_TRIES, len(room))):
        # Least room first, but not less than is wanted: that would take one sequence more.
        cost = np.where(room >= wanted_room, room, room + length)
        # The last of equal ones: documents that are passed over go with the window before them.
        place = len(room) - 1 - int(np.argmin(cost[::-1]))
        num_documents = first_end + place
        total = int(totals[num_documents - 1])
        chosen = falling[falling < num_pieces[num_documents - 1]]
        filled = fill(pieces.num_tokens[chosen].tolist(), length)
        waste = filled.num_sequences * length - total
        share = total / max(filled.num_sequences * length, 1)
        if share > best_share:
            sequence = np.empty(len(chosen), dtype=np.int64)
            sequence[chosen] = filled.sequence
            best_share, best = share, Fit(num_documents, pieces, sequence, filled.num_sequences)
        if waste * _ENOUGH <= total:
            break
        # The next try leaves as much room as this one has lost outside its emptiest sequence; it is another end.
        wanted_room = waste - filled.most_room
        room[place] = 4 * length
    used_pieces = DocumentPieces(*(column[: len(best.sequence)] for column in pieces))
    return best._replace(pieces=used_pieces)
