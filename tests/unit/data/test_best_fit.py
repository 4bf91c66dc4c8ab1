"""Best fit beside plain references: the same pieces in the same sequences, the same ends, the same rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.data.order.records import Status
from hfdist.data.packing.sequence import IGNORED, Shape
from hfdist.data.packing.windows import best_fit, cut, fill, fit, one_each
from hfdist.data.sources.document_batch import Document
from tests.unit.data.document_batches import in_chunks

sizes_of_documents = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 70)), min_size=1, max_size=80)
length_of_sequences = st.sampled_from([1, 4, 16, 30])


def plain_fill(lengths, length):
    """The fullest sequence with room; of equally full ones the one that was filled last."""
    room, turns, sequence = [], [], []
    for turn, num_tokens in enumerate(lengths):
        fitting = [number for number, left in enumerate(room) if left >= num_tokens]
        if fitting:
            number = min(fitting, key=lambda one: (room[one], -turns[one]))
        else:
            number = len(room)
            room.append(length)
            turns.append(turn)
        room[number] -= num_tokens
        turns[number] = turn
        sequence.append(number)
    return sequence, room


def plain_fit(sizes, length, may_end_before):
    """Number of documents, and the sequences as sorted lists of (document, first token, tokens)."""
    ends = range((len(sizes) + 1) // 2 if may_end_before else len(sizes), len(sizes) + 1)
    spare, tried, best = sum(sizes) // 1024, set(), None
    while len(tried) < min(4, len(ends)):

        def looks(end, spare=spare):
            room = -sum(sizes[:end]) % length
            return (room if room >= spare else room + length, -end)

        end = min((one for one in ends if one not in tried), key=looks)
        tried.add(end)
        pieces = [
            (number, first, min(length, size - first))
            for number, size in enumerate(sizes[:end])
            for first in range(0, size, length)
        ]
        pieces.sort(key=lambda piece: -piece[2])
        sequence, room = plain_fill([piece[2] for piece in pieces], length)
        share = sum(sizes[:end]) / max(len(room) * length, 1)
        if best is None or share > best[0]:
            filled = [sorted(p for p, own in zip(pieces, sequence, strict=True) if own == n) for n in range(len(room))]
            best = share, end, filled
        if sum(room) * 512 <= sum(sizes[:end]):
            break
        spare = sum(room) - max(room)
    return best[1:]


@given(lengths=st.lists(st.integers(1, 40), max_size=120))
@settings(max_examples=300, deadline=None)
def test_each_piece_goes_where_a_plain_best_fit_puts_it(lengths):
    lengths = sorted(lengths, reverse=True)
    sequence, room = plain_fill(lengths, 40)
    assert fill(lengths, 40) == (sequence, len(room), max(room, default=0))


@given(sizes=sizes_of_documents, length=length_of_sequences, may_end_before=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_window_ends_where_a_plain_search_ends_it(sizes, length, may_end_before):
    num_documents, pieces, sequence, num_sequences = fit(np.array(sizes), length, may_end_before=may_end_before)
    sequences = [[] for _ in range(num_sequences)]
    for number, piece in zip(sequence.tolist(), zip(*(column.tolist() for column in pieces), strict=True), strict=True):
        sequences[number].append(piece)
    assert (num_documents, sequences) == plain_fit(sizes, length, may_end_before)


def test_a_long_document_is_cut_and_an_empty_one_gives_nothing():
    pieces = cut(np.array([7, 0, 3, 8]), 4)
    assert pieces.document.tolist() == [0, 0, 2, 3, 3]
    assert pieces.first_token.tolist() == [0, 4, 0, 0, 4]
    assert pieces.num_tokens.tolist() == [4, 3, 3, 4, 4]


def test_the_fullest_sequence_that_has_room_is_taken():
    assert fill([6, 5, 4, 3, 2], 10)[0] == [0, 1, 0, 1, 1]


def test_web_like_documents_fill_sequences_and_none_is_cut_that_fits():
    rng, length = np.random.default_rng(0), 2048
    sizes = np.rint(rng.lognormal(6.05, 1.0, size=10_000)).astype(int).clip(1, 50_000).tolist()
    documents = [Document(n, np.zeros(size, np.int32), Status.trained) for n, size in enumerate(sizes)]
    sequences = list(best_fit(in_chunks(documents, 50), 0, Shape(length, 0), ("key",)))
    records = np.concatenate([sequence.records for sequence in sequences])
    assert not ((records["num_tokens"] < records["of_tokens"]) & (records["of_tokens"] <= length)).any()
    assert records["num_tokens"].sum() == sum(sizes)
    assert sum(sizes) >= 0.997 * length * len(sequences)


FILL = 99
ids = st.integers(-50, 50)
fates = st.sampled_from([Status.trained, Status.trained, Status.trained, Status.quarantined])
documents_with_context = st.lists(st.tuples(st.lists(ids, max_size=30), fates), min_size=1, max_size=40)


def plain_rows(pieces, length):
    """Token by token: input_ids, position_ids and labels of documents' pieces, filled up."""
    columns = []
    for document, record in pieces:
        first, num_tokens = int(record["first_token"]), int(record["num_tokens"])
        for position, token in enumerate(document.tokens[first : first + num_tokens].tolist()):
            if document.fate is Status.quarantined:
                columns.append((FILL, position, IGNORED))
            elif token < 0:
                columns.append((~token, position, IGNORED))
            else:
                columns.append((token, position, token if position else IGNORED))
    columns += [(FILL, position, IGNORED) for position in range(length - len(columns))]
    return [list(row) for row in zip(*columns, strict=True)]


@given(
    contents=documents_with_context,
    length=st.sampled_from([4, 9, 16]),
    cut_tokens=st.integers(0, 3),
    chunk=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("packing", [best_fit, one_each])
def test_sequences_made_together_are_those_made_token_by_token(packing, contents, length, cut_tokens, chunk):
    documents = [
        Document(n, np.array(tokens, dtype=np.int32), fate if tokens else Status.empty, cut_tokens=cut_tokens)
        for n, (tokens, fate) in enumerate(contents)
    ]
    for made in packing(in_chunks(documents, chunk, epoch=3), 0, Shape(length, FILL), ("key",)):
        rows = plain_rows([(documents[one["document"]], one) for one in made.records], made.rows.shape[1])
        assert made.rows.tolist() == rows
        assert made.rows.dtype == np.int32
        assert made.num_tokens == sum(made.records["num_tokens"])
        # What is passed over stands first.
        assert (np.diff(made.records["num_tokens"] > 0, prepend=False) >= 0).all()
        for record in made.records:
            of = documents[record["document"]]
            assert (record["fate"], record["epoch"]) == (of.fate, 3)
            assert (record["sequence"], record["pool"]) == (0, 0)
            assert record["num_tokens"] or record["first_token"] == 0
            assert record["of_tokens"] == (len(of.tokens) + cut_tokens if record["num_tokens"] else 0)


def test_a_window_ends_where_it_ends_however_documents_come():
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 60, size=700).tolist()
    documents = [Document(n, np.full(size, n, np.int32), Status.trained) for n, size in enumerate(sizes)]

    def places(chunk):
        return [one.next_place for one in best_fit(in_chunks(documents, chunk), 0, Shape(100, 0), ("key",))]

    assert places(1) == places(32) == places(700)
    # What is handed out of a window does not depend on what stands behind it, but for what decides where it ends.
    assert len({place.position for place in places(32)}) > 5
