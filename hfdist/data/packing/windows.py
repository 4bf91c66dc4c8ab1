"""Packing that looks at several documents before it makes sequences of them: whole documents, or one each.

A window begins at a document and ends by rules that depend on it and those behind it only, so that a cursor of two
numbers, where the window begins and which of its sequences is next, finds the place again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hfdist.data.order.cursor import Place
from hfdist.data.order.records import RECORD, Records, join
from hfdist.data.order.shuffle import permutation
from hfdist.data.packing.best_fit import Integers, Pieces, fit
from hfdist.data.packing.fill import Arrangement, make_sequences
from hfdist.data.packing.sequence import Sequence, Shape, without_tokens
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import CheckpointError

# Windows of best_fit grow, so that a first batch comes soon and the filling of last sequences becomes rare.
_LEAST_DOCUMENTS, _MOST_DOCUMENTS = 64, 1024
_MOST_SEQUENCES = 512
# Documents that `none` sorts by length.
_SORTED_DOCUMENTS = 64
_ROUNDED_TOKENS = 8


class _Window(NamedTuple):
    """Neighbouring documents of one lane and epoch."""

    begin: Place
    """Of the first of them."""
    behind: Place
    """Of the next one behind them, or of none."""
    documents: DocumentBatch
    arrangement: Arrangement


_Arrange = Callable[[Integers, Place, bool], tuple[int, Arrangement] | None]
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

    def arrange(sizes: Integers, begin: Place, is_all: bool) -> tuple[int, Arrangement] | None:
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
        ordered = Pieces(*(column[order] for column in pieces))
        return num_documents, Arrangement(ordered, ends, np.full(num_sequences, length))

    return _give(_windows(chunks, arrange), first, shape)


def one_each(
    chunks: Iterator[tuple[Place, DocumentBatch]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Give each document by itself, cut off at the length, in an order in which all lanes have like lengths at a time.

    Args:
        chunks: documents in order, from the beginning of a window on, each of one epoch, and the place of the
            first of them; offsets do not count.
        first: sequence of that window to begin with.
        shape: of sequences.
        key: of the order of lengths; the same in all lanes.
    """

    def arrange(sizes: Integers, begin: Place, is_all: bool) -> tuple[int, Arrangement] | None:
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
        pieces = Pieces(with_tokens[order], np.zeros_like(used), used)
        lengths = np.minimum(-(-used // _ROUNDED_TOKENS) * _ROUNDED_TOKENS, shape.length)
        num_documents = int(with_tokens[-1]) + 1 if is_full else len(sizes)
        return num_documents, Arrangement(pieces, np.arange(len(used)) + 1, lengths)

    windows = _windows(chunks, arrange, _SORTED_DOCUMENTS)
    return _give(windows, first, shape, last_length=min(_ROUNDED_TOKENS, shape.length))


class _Pending:
    """Neighbouring documents of one lane and epoch that are in no window yet."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[Place, DocumentBatch]] = deque()
        self.num_with_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._chunks

    @property
    def begin(self) -> Place:
        """Place of the first of them."""
        return self._chunks[0][0]

    @property
    def sizes(self) -> Integers:
        """Their tokens; shape [documents]."""
        return np.concatenate([chunk.lengths for _, chunk in self._chunks])

    def add(self, place: Place, chunk: DocumentBatch) -> None:
        """Take some more, one at least."""
        self._chunks.append((place, chunk))
        self.num_with_tokens += int(np.count_nonzero(chunk.lengths))

    def take(self, num_documents: int) -> tuple[DocumentBatch, Place]:
        """Give the first of them, and the place behind them."""
        taken, behind = [], self.begin
        while num_documents:
            place, chunk = self._chunks.popleft()
            count = min(num_documents, len(chunk.numbers))
            behind = Place(place.epoch, place.position + count)
            if count < len(chunk.numbers):
                self._chunks.appendleft((behind, chunk.part(count, len(chunk.numbers))))
                chunk = chunk.part(0, count)
            taken.append(chunk)
            num_documents -= count
        joined = DocumentBatch.join(taken)
        self.num_with_tokens -= int(np.count_nonzero(joined.lengths))
        return joined, behind


def _windows(chunks: Iterator[tuple[Place, DocumentBatch]], arrange: _Arrange, least: int = 0) -> Iterator[_Window]:
    """Cut a run of documents; a window ends with its epoch, and else has at least `least` documents with tokens."""
    pending = _Pending()

    def take(*, is_all: bool) -> Iterator[_Window]:
        # Else each chunk without tokens would be looked at again with every one that follows.
        while not pending.is_empty and (is_all or pending.num_with_tokens >= least):
            begin = pending.begin
            if (found := arrange(pending.sizes, begin, is_all)) is None:
                return
            num_documents, arrangement = found
            documents, behind = pending.take(num_documents)
            yield _Window(begin, behind, documents, arrangement)

    for place, chunk in chunks:
        if not pending.is_empty and pending.begin.epoch != place.epoch:
            yield from take(is_all=True)
        if len(chunk.numbers):
            pending.add(place, chunk)
        yield from take(is_all=False)
    yield from take(is_all=True)


def _give(
    windows: Iterator[_Window], first: int, shape: Shape, *, last_length: int | None = None
) -> Iterator[Sequence]:
    """Give the sequences of windows; what a window passes over goes with its first one, or with the next window's.

    Args:
        windows: in order.
        first: sequence of the first window to begin with.
        shape: of sequences.
        last_length: of a sequence without tokens, for what is passed over at the very end; None: `shape.length`.
    """
    passed: list[Records] = []
    problems: list[str] = []
    behind = Place()
    for begin, behind, documents, arrangement in windows:
        num_sequences = len(arrangement.ends)
        if first > 0 and first >= num_sequences:
            raise CheckpointError(
                "the data cursor stands behind the end of a window: the data have changed, or it is damaged",
                where="cursor.places",
                found=f"sequence {first} of {num_sequences}",
                hint="the data of the checkpoint, or a new run.name",
            )
        if first == 0 and not documents.lengths.all():
            passed.append(_passed_over(documents, begin.epoch))
            problems += [str(error) for _, error in sorted(documents.errors.items())]
        if not num_sequences:
            continue
        made = make_sequences(documents, begin, behind, arrangement, shape, first)
        if passed:
            with_passed = next(made)
            yield with_passed._replace(records=join([*passed, with_passed.records]), problems=tuple(problems))
            passed, problems = [], []
        yield from made
        first = 0
    if passed:
        length = shape.length if last_length is None else last_length
        yield without_tokens(length, shape, behind, join(passed), tuple(problems))


def _passed_over(documents: DocumentBatch, epoch: int) -> Records:
    """Records of those without tokens."""
    places = np.flatnonzero(documents.lengths == 0)
    records = np.zeros(len(places), dtype=RECORD)
    records["document"], records["fate"], records["epoch"] = documents.numbers[places], documents.fates[places], epoch
    return records
