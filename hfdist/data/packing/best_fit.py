"""Best fit on lengths alone: where a window of documents ends, and which of its pieces share a sequence."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from hfdist.data.packing.sequence import Integers

RULE = 2
"""Version of the rules for where a window ends and what shares a sequence: cursors of different versions differ."""

# Ends of one window that are tried, and with what share of room left over none is looked for any more.
_MOST_TRIES = 4
_ENOUGH = 512
# Room that the first try leaves for what does not come out even, as a share of the tokens.
_SPARE = 1024


class Pieces(NamedTuple):
    """Documents cut to the length of a sequence, in the order of the documents; each of shape [pieces]."""

    document: Integers
    """Its place among the documents."""
    first_token: Integers
    num_tokens: Integers


def cut(sizes: Integers, length: int) -> Pieces:
    """Cut documents of `sizes` tokens, shape [documents], that are longer than `length`; empty ones give no piece."""
    counts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_token = number * length
    return Pieces(document, first_token, np.minimum(sizes[document] - first_token, length))


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


def fit(sizes: Integers, length: int, *, may_end_before: bool) -> tuple[int, Pieces, Integers, int]:
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
    own_pieces = Pieces(*(column[: len(sequence)] for column in pieces))
    return num_documents, own_pieces, sequence, num_sequences
