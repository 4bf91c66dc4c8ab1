"""Packing that looks at several documents before it makes sequences of them: whole documents, or one each.

A window begins at a document and ends by rules that depend on it and those behind it only, so that a cursor of two
numbers, where the window begins and which of its sequences is next, finds the place again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hfdist.data.cursor import Place
from hfdist.data.order import permutation
from hfdist.data.packing.fit import Pieces, fit
from hfdist.data.packing.sequence import Placed, Sequence, Shape, assemble, passed_over, problems_of
from hfdist.data.packing.whole import Arrangement, make_sequences
from hfdist.data.records import make_records
from hfdist.errors import CheckpointError

# Windows of best_fit grow, so that a first batch comes soon and the filling of last sequences becomes rare.
_LEAST_DOCUMENTS, _MOST_DOCUMENTS = 64, 1024
_MOST_SEQUENCES = 512
# Documents that `none` sorts by length.
_SORTED_DOCUMENTS = 64
_ROUNDED_TOKENS = 8


class _Window(NamedTuple):
    """Neighbouring documents of one lane and epoch."""

    documents: list[Placed]
    sizes: list[int]
    """Their tokens."""
    arrangement: Arrangement


_Arrange = Callable[[list[int], Placed, bool], tuple[int, Arrangement] | None]
"""From the sizes of the next documents, the first of them, and whether they are all: the number of those that are a
window, and how; None: more are needed to tell."""


def best_fit(
    portions: Iterator[list[Placed]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Pack whole documents, each where it leaves least room; only one longer than a sequence is cut.

    Args:
        portions: documents in order, from the beginning of a window on; each of one epoch.
        first: sequence of that window to begin with.
        shape: of sequences.
        key: of the order of a window's sequences.
    """
    length = shape.length

    def arrange(sizes: list[int], begin: Placed, is_all: bool) -> tuple[int, Arrangement] | None:
        most = min(max(begin.position, _LEAST_DOCUMENTS), _MOST_DOCUMENTS)
        is_full = len(sizes) >= most or sum(sizes) >= _MOST_SEQUENCES * length
        if not is_full and not is_all:
            return None
        tokens = np.array(sizes[:most], dtype=np.int64)
        last = int(np.searchsorted(np.cumsum(tokens), _MOST_SEQUENCES * length))
        num_documents, pieces, sequence, num_sequences = fit(tokens[: last + 1], length, may_end_before=is_full)
        rank = np.empty(num_sequences, dtype=np.int64)
        rank[permutation(num_sequences, *key, begin.epoch, begin.position, "bins")] = np.arange(num_sequences)
        # Inside a sequence documents stay in order.
        order = np.argsort(rank[sequence], kind="stable")
        ends = np.cumsum(np.bincount(rank[sequence], minlength=num_sequences))
        ordered = Pieces(*(column[order] for column in pieces))
        return num_documents, Arrangement(ordered, ends, np.full(num_sequences, length))

    return _give(_windows(portions, arrange), first, shape)


def one_each(
    portions: Iterator[list[Placed]], first: int, shape: Shape, key: tuple[int | str, ...]
) -> Iterator[Sequence]:
    """Give each document by itself, cut off at the length, in an order in which all lanes have like lengths at a time.

    Args:
        portions: documents in order, from the beginning of a window on; each of one epoch.
        first: sequence of that window to begin with.
        shape: of sequences.
        key: of the order of lengths; the same in all lanes.
    """

    def arrange(sizes: list[int], begin: Placed, is_all: bool) -> tuple[int, Arrangement] | None:
        with_tokens = np.flatnonzero(sizes)[:_SORTED_DOCUMENTS]
        is_full = len(with_tokens) == _SORTED_DOCUMENTS
        if not is_full and not is_all:
            return None
        tokens = np.array(sizes, dtype=np.int64)[with_tokens]
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

    windows = _windows(portions, arrange, _SORTED_DOCUMENTS)
    return _give(windows, first, shape, last_length=min(_ROUNDED_TOKENS, shape.length))


def _windows(portions: Iterator[list[Placed]], arrange: _Arrange, least: int = 0) -> Iterator[_Window]:
    """Cut a run of documents; a window ends with its epoch, and else has at least `least` documents with tokens."""
    waiting: list[Placed] = []
    sizes: list[int] = []
    with_tokens = 0

    def take(*, is_all: bool) -> Iterator[_Window]:
        nonlocal with_tokens
        # Else each portion without tokens would be looked at again with every one that follows.
        while waiting and (is_all or with_tokens >= least):
            if (found := arrange(sizes, waiting[0], is_all)) is None:
                return
            num_documents, arrangement = found
            yield _Window(waiting[:num_documents], sizes[:num_documents], arrangement)
            del waiting[:num_documents], sizes[:num_documents]
            with_tokens = len(sizes) - sizes.count(0)

    for portion in portions:
        if waiting and portion and waiting[0].epoch != portion[0].epoch:
            yield from take(is_all=True)
        waiting += portion
        own = [len(placed.document.tokens) for placed in portion]
        sizes += own
        with_tokens += len(own) - own.count(0)
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
    passed: list[Placed] = []
    for documents, sizes, arrangement in windows:
        epoch, position, _ = documents[0]
        num_sequences = len(arrangement.ends)
        if first == 0:
            passed += [placed for placed, size in zip(documents, sizes, strict=True) if not size]
        elif first >= num_sequences:
            raise CheckpointError(
                "the data cursor stands behind the end of a window: the data have changed, or it is damaged",
                where="cursor.places",
                found=f"sequence {first} of {num_sequences}",
                hint="the data of the checkpoint, or a new run.name",
            )
        if not num_sequences:
            continue
        for number, made in enumerate(make_sequences(documents, arrangement, shape, first), first):
            is_last = number == num_sequences - 1
            place = Place(epoch, documents[-1].position + 1) if is_last else Place(epoch, position, number + 1)
            records = made.records
            problems: tuple[str, ...] = ()
            if number == 0 and passed:
                before = make_records([passed_over(placed) for placed in passed])
                records, problems, passed = np.concatenate([before, records]), problems_of(passed), []
            yield Sequence(made.parts, made.lengths, made.blanks, place, made.num_tokens, records, problems)
        first = 0
    if passed:
        yield assemble([], passed, shape, Place(passed[-1].epoch, passed[-1].position + 1), length=last_length)
