"""Packing that looks at several documents before it makes sequences of them: whole documents, or one each.

A window begins at a document and ends by rules that depend on it and on those after it only, so that a cursor of two
numbers, where the window begins and which of its sequences is next, finds the place again.
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
from hfdist.data.packing.sequence import Integers, Problem, Sequence, Shape, after_the_end, filling, without_tokens
from hfdist.data.sources.document_batch import DocumentBatch, slices

# Windows of best_fit grow, so that a first batch comes soon and the filling of last sequences becomes rare.
_LEAST_DOCUMENTS, _MOST_DOCUMENTS = 64, 1024
_MOST_SEQUENCES = 512
# Documents that `none` sorts by length.
_SORTED_DOCUMENTS = 64
_ROUNDED_TOKENS = 8


class _Arrangement(NamedTuple):
    """Pieces of a window's documents, sequence by sequence."""

    pieces: DocumentPieces
    ends: Integers
    """Where each sequence ends, counted in pieces; shape [sequences]."""
    lengths: Integers
    """Tokens of each sequence, its filling included; at most `shape.length`. Shape [sequences]."""


class _Window(NamedTuple):
    """Neighbouring documents of one lane and epoch."""

    begin: Place
    """Place of the first of the documents."""
    next_place: Place
    """Place after the last of the documents."""
    documents: DocumentBatch
    arrangement: _Arrangement


_Arrange = Callable[[Integers, Place, bool], tuple[int, _Arrangement] | None]
"""From the sizes of the next documents, the place of the first, and whether they are all: the number of those that are
a window, and how; None: more are needed to tell."""


def best_fit(
    chunks: Iterator[tuple[Place, DocumentBatch]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Pack whole documents, each where it leaves least room; only one longer than a sequence is cut.

    Args:
        chunks: documents in order, from the beginning of a window on, each of one epoch, and the place of the
            first of them; offsets do not count.
        first: sequence of that window to begin with.
        shape: of sequences.
        key: of the order of a window's sequences.
    """
    length = shape.length

    def arrange(sizes: Integers, begin: Place, is_all: bool) -> tuple[int, _Arrangement] | None:
        most = min(max(begin.position, _LEAST_DOCUMENTS), _MOST_DOCUMENTS)
        is_full = len(sizes) >= most or sizes.sum() >= _MOST_SEQUENCES * length
        if not is_full and not is_all:
            return None
        tokens = sizes[:most]
        last = int(np.searchsorted(np.cumsum(tokens), _MOST_SEQUENCES * length))
        num_documents, pieces, sequence, num_sequences = fit(tokens[: last + 1], length, may_end_before=is_full)
        rank = np.empty(num_sequences, dtype=np.int64)
        rank[permutation(num_sequences, *key, begin.epoch, begin.position, "bins")] = np.arange(num_sequences)
        # Inside a sequence documents stay in order.
        order = np.argsort(rank[sequence], kind="stable")
        ends = np.cumsum(np.bincount(rank[sequence], minlength=num_sequences))
        ordered = DocumentPieces(*(column[order] for column in pieces))
        return num_documents, _Arrangement(ordered, ends, np.full(num_sequences, length))

    return _sequences(_windows(chunks, arrange), first, shape, length)


def one_each(
    chunks: Iterator[tuple[Place, DocumentBatch]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Give each document by itself, cut off at the length, in an order in which all lanes have like lengths at a time.

    The arguments are those of `best_fit`; `key`, of the order of lengths, is the same in all lanes.
    """

    def arrange(sizes: Integers, begin: Place, is_all: bool) -> tuple[int, _Arrangement] | None:
        with_tokens = np.flatnonzero(sizes)[:_SORTED_DOCUMENTS]
        is_full = len(with_tokens) == _SORTED_DOCUMENTS
        if not is_full and not is_all:
            return None
        tokens = sizes[with_tokens]
        by_length = np.argsort(tokens, kind="stable")
        # All lanes take the same quantile at the same time.
        slots = np.full(_SORTED_DOCUMENTS, -1)
        slots[np.arange(len(tokens)) * _SORTED_DOCUMENTS // max(len(tokens), 1)] = by_length
        order = slots[permutation(_SORTED_DOCUMENTS, *key, begin.epoch, "lengths")]
        order = order[order >= 0]
        used = np.minimum(tokens[order], shape.length)
        pieces = DocumentPieces(with_tokens[order], np.zeros_like(used), used)
        lengths = np.minimum(-(-used // _ROUNDED_TOKENS) * _ROUNDED_TOKENS, shape.length)
        num_documents = int(with_tokens[-1]) + 1 if is_full else len(sizes)
        return num_documents, _Arrangement(pieces, np.arange(len(used)) + 1, lengths)

    windows = _windows(chunks, arrange, _SORTED_DOCUMENTS)
    return _sequences(windows, first, shape, min(_ROUNDED_TOKENS, shape.length))


class _Pending:
    """Neighbouring documents of one lane and epoch that are in no window yet."""

    def __init__(self) -> None:
        self.chunks: deque[tuple[Place, DocumentBatch]] = deque()
        self.num_with_tokens = 0

    def add(self, place: Place, chunk: DocumentBatch) -> None:
        self.chunks.append((place, chunk))
        self.num_with_tokens += int(np.count_nonzero(chunk.lengths))

    def take(self, num_documents: int) -> tuple[DocumentBatch, Place]:
        """Take the first of them; also returns the place after them."""
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
    """Split documents into windows; one ends with its epoch, and else has at least `least` documents with tokens."""
    pending = _Pending()

    def take(*, is_all: bool) -> Iterator[_Window]:
        # Chunks without tokens do not count here: each would be looked at again with every chunk that follows.
        while pending.chunks and (is_all or pending.num_with_tokens >= least):
            begin, sizes = pending.chunks[0][0], np.concatenate([chunk.lengths for _, chunk in pending.chunks])
            if (found := arrange(sizes, begin, is_all)) is None:
                return
            num_documents, arrangement = found
            documents, next_place = pending.take(num_documents)
            yield _Window(begin, next_place, documents, arrangement)

    for place, chunk in chunks:
        if pending.chunks and pending.chunks[0][0].epoch != place.epoch:
            yield from take(is_all=True)
        if len(chunk.numbers):
            pending.add(place, chunk)
        yield from take(is_all=False)
    yield from take(is_all=True)


def _sequences(windows: Iterator[_Window], first: int, shape: Shape, last_length: int) -> Iterator[Sequence]:
    """Give the sequences of windows; what a window passes over goes with its first one, or with the next window's.

    They begin with number `first` of the first window. A sequence without tokens, for what is passed over at the very
    end, has `last_length`.
    """
    passed: list[Records] = []
    problems: list[Problem] = []
    next_place = Place()
    for window in windows:
        documents, next_place, num_sequences = window.documents, window.next_place, len(window.arrangement.ends)
        if first > 0 and first >= num_sequences:
            raise after_the_end("window", f"sequence {first} of {num_sequences}")
        if first == 0 and not documents.lengths.all():
            empty = np.flatnonzero(documents.lengths == 0)
            numbers, fates = documents.numbers[empty], documents.fates[empty]
            passed.append(make_records(len(empty), document=numbers, fate=fates, epoch=window.begin.epoch))
            errors = sorted(documents.errors.items())
            problems += [Problem(int(documents.numbers[place]), str(error)) for place, error in errors]
        if not num_sequences:
            continue
        made = _of_window(window, shape, first)
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


def _of_window(window: _Window, shape: Shape, first: int) -> Iterator[Sequence]:
    """Give the sequences of a window from number `first` on: all made together, which makes numpy's calls cheap.

    Their records have nothing of what the window passes over.
    """
    documents, (pieces, ends, lengths) = window.documents, window.arrangement
    owners, fates = pieces.document, documents.fates[pieces.document]
    records = make_records(
        len(owners),
        document=documents.numbers[owners],
        first_token=pieces.first_token,
        num_tokens=pieces.num_tokens,
        of_tokens=(documents.lengths + documents.cut_tokens)[owners],
        epoch=window.begin.epoch,
        fate=fates,
    )
    room = lengths - np.diff(np.cumsum(pieces.num_tokens)[ends - 1], prepend=0)
    has_room = room > 0
    # What fills a sequence up is one more piece at its end. Its tokens are in one more array after the others. What
    # stands for quarantined documents is in that array, too.
    tokens, filler = [*documents.tokens, filling(shape.length, shape)], len(documents.tokens)
    is_blank = fates == Status.quarantined
    arrays = np.where(is_blank, filler, documents.arrays[owners])
    starts = np.where(is_blank, 0, documents.starts[owners] + pieces.first_token)
    columns = np.stack([arrays, starts, pieces.num_tokens, is_blank])
    fillers = np.zeros((len(columns), np.count_nonzero(has_room)), dtype=np.int64)
    fillers[0], fillers[2], fillers[3] = filler, room[has_room], True
    arrays, starts, sizes, is_blank = np.insert(columns, ends[has_room], fillers, axis=1)
    parts = slices(tokens, arrays, starts, sizes)
    filled_ends = ends + np.cumsum(has_room)
    blanks = _blanks(sizes, is_blank, filled_ends, lengths)
    counts, num_tokens = sizes.tolist(), (lengths - room).tolist()
    part_ends, record_ends = [0, *filled_ends.tolist()], [0, *ends.tolist()]
    for number in range(first, len(ends)):
        start, stop = part_ends[number : number + 2]
        own_records = records[record_ends[number] : record_ends[number + 1]]
        is_last = number == len(ends) - 1
        yield Sequence(
            parts[start:stop],
            counts[start:stop],
            blanks[number],
            window.next_place if is_last else Place(window.begin.epoch, window.begin.position, number + 1),
            num_tokens[number],
            count_new_documents(own_records),
            own_records,
        )


def _blanks(sizes: Integers, is_blank: Integers, ends: Integers, lengths: Integers) -> list[list[tuple[int, int]]]:
    """Give from where to where a sequence has no targets, for each.

    `sizes` are of the parts of a window in order, `is_blank` says which are no targets, `ends` are counted in parts.
    """
    blanks: list[list[tuple[int, int]]] = [[] for _ in ends]
    places = np.flatnonzero(is_blank)
    sequence = np.searchsorted(ends, places, side="right")
    stops = np.cumsum(sizes)[places] - (np.cumsum(lengths) - lengths)[sequence]
    for number, stop, size in zip(sequence.tolist(), stops.tolist(), sizes[places].tolist(), strict=True):
        blanks[number].append((stop - size, stop))
    return blanks


RULE = 2
"""Version of the rules for where a window ends and what shares a sequence: cursors of different versions differ."""

# Ends of one window that are tried, and with what share of room left over none is looked for any more.
_MOST_TRIES = 4
_ENOUGH = 512
# Room that the first try leaves for what does not come out even, as a share of the tokens.
_SPARE = 1024


class DocumentPieces(NamedTuple):
    """Documents cut to the length of a sequence, in the order of the documents; each of shape [pieces]."""

    document: Integers
    """Place of the piece's document among the documents."""
    first_token: Integers
    num_tokens: Integers


def cut(sizes: Integers, length: int) -> DocumentPieces:
    """Cut documents of `sizes` tokens, shape [documents], that are longer than `length`; empty ones give no piece."""
    counts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_token = number * length
    return DocumentPieces(document, first_token, np.minimum(sizes[document] - first_token, length))


def fill(lengths: list[int], length: int) -> tuple[list[int], int, int]:
    """Put each piece into the fullest sequence that still has room for it; of equal ones into the youngest.

    Args:
        lengths: of pieces, falling, from `length` to 1.
        length: of sequences.

    Returns:
        The sequence of each piece; the number of sequences; the most room that one of them has left.
    """
    sequence: list[int] = []
    num_sequences = 0
    room: list[int] = []
    """Sizes of the room that sequences have left, rising; each once."""
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
    return sequence, num_sequences, room[-1] if room else 0


def fit(sizes: Integers, length: int, *, may_end_before: bool) -> tuple[int, DocumentPieces, Integers, int]:
    """Choose where a window ends, and fill sequences with its pieces.

    Sequences are full but for the last one if the tokens up to the end are a little less than a multiple of the length.
    So among the ends in the second half the one that leaves least room is taken, of a few that look best.

    Args:
        sizes: tokens of the documents that the window may have.
        length: of sequences.
        may_end_before: the last of them; else it has them all.

    Returns:
        Number of documents; their pieces; the sequence of each piece, and the number of sequences.
    """
    pieces = cut(sizes, length)
    falling = np.argsort(-pieces.num_tokens, kind="stable")
    num_pieces = np.searchsorted(pieces.document, np.arange(1, len(sizes) + 1))
    totals = np.cumsum(sizes)
    first_end = (len(sizes) + 1) // 2 if may_end_before else len(sizes)
    room = -totals[first_end - 1 :] % length
    wanted = int(totals[-1]) // _SPARE
    best_share, best = -1.0, (0, np.empty(0, dtype=np.int64), 0)
    for _ in range(min(_MOST_TRIES, len(room))):
        over = np.where(room >= wanted, room, room + length)
        # The last of equal ones: what is passed over goes with the window before it.
        place = len(room) - 1 - int(np.argmin(over[::-1]))
        num_documents = first_end + place
        total = int(totals[num_documents - 1])
        own = falling[falling < num_pieces[num_documents - 1]]
        filled, num_sequences, most_room = fill(pieces.num_tokens[own].tolist(), length)
        waste = num_sequences * length - total
        share = total / max(num_sequences * length, 1)
        if share > best_share:
            sequence = np.empty(len(own), dtype=np.int64)
            sequence[own] = filled
            best_share, best = share, (num_documents, sequence, num_sequences)
        if waste * _ENOUGH <= total:
            break
        wanted = waste - most_room
        room[place] = 4 * length
    num_documents, sequence, num_sequences = best
    own_pieces = DocumentPieces(*(column[: len(sequence)] for column in pieces))
    return num_documents, own_pieces, sequence, num_sequences
