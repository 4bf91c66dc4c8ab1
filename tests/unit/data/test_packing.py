"""Packing on literals, and its laws on documents of any length."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Status
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, Shape
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import CheckpointError, DataError
from tests.unit.data.document_batches import Document, columns, in_chunks, one_by_one

FILL = 99


def document(number, *ids, fate=Status.trained, error=None):
    return Document(number, np.array(ids, dtype=np.int32), fate, error)


def numbered(lengths, fate=lambda n: Status.trained):
    """Documents whose tokens tell the document and the place in it."""
    return [
        document(n, *(1000 * n + k for k in range(length)), fate=fate(n) if length else Status.empty)
        for n, length in enumerate(lengths)
    ]


def pack(packing, documents, length, offset=0, chunk=3, first=0):
    """Sequences of documents from that with the number `first` on."""
    placed = list(in_chunks(documents[first:], chunk, first=first))
    if packing is concat:
        placed[0] = placed[0][0]._replace(offset=offset), placed[0][1]
    return list(in_sequences(packing, placed, length, offset))


def in_sequences(packing, placed, length, offset=0):
    if packing is concat:
        return concat(iter(placed), Shape(length, FILL))
    return packing(iter(placed), offset, Shape(length, FILL), ("key",))


@pytest.mark.parametrize("packing", [concat, best_fit, one_each])
def test_each_bad_row_is_told_once_with_the_sequence_that_records_it(packing):
    rng = np.random.default_rng(0)
    documents = [
        document(n, fate=Status.bad, error=DataError(f"row {n}"))
        if n % 5 == 3
        else document(n, *range(1, rng.integers(2, 30)))
        for n in range(700)
    ]
    sequences = pack(packing, documents, 50, chunk=7)
    for sequence in sequences:
        bad = sequence.records[sequence.records["fate"] == Status.bad]
        assert sequence.problems == tuple((number, f"Data error: row {number}") for number in bad["document"])
    assert sum(len(sequence.problems) for sequence in sequences) == 140
    # Of several windows.
    assert sum(bool(sequence.problems) for sequence in sequences) > 3


def test_parts_of_a_batch_after_each_other_are_the_batch():
    fates = {1: Status.bad, 4: Status.bad}
    documents = [
        Document(10 + n, np.arange(0 if n in fates else n + 1), fates.get(n, Status.trained), None, n) for n in range(6)
    ]
    documents = [one._replace(error=DataError("torn")) if one.fate is Status.bad else one for one in documents]
    whole = columns(documents)
    for place in range(1, len(documents)):
        joined = one_by_one(DocumentBatch.join([whole.part(0, place), whole.part(place, len(documents))]))
        assert [one.tokens.tolist() for one in joined] == [one.tokens.tolist() for one in documents]
        assert [one._replace(tokens=None) for one in joined] == [one._replace(tokens=None) for one in documents]


def test_tokens_of_several_types_share_a_sequence():
    """Token files of two sources: ids that fit two bytes, and complements."""
    wide = columns([document(0, 7, ~8, 9)])
    narrow = replace(columns([document(1, 1, 2, 3)]), tokens=[np.array([5, 5, 5, 1, 2, 65_000], dtype=np.uint16)])
    for packing in (best_fit, one_each):
        sequences = list(packing(iter([(Place(0, 0), wide), (Place(0, 1), narrow)]), 0, Shape(6, FILL), ("key",)))
        ids = [one.rows[INPUT_IDS].tolist() for one in sequences]
        assert sorted(token for row in ids for token in row if token != FILL) == [1, 2, 7, 8, 9, 65_000]


lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]), min_size=1, max_size=60)


@given(lengths=lengths, length=st.sampled_from([4, 8]), stop=st.integers(1, 20), chunk=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("packing", [concat, best_fit, one_each])
def test_packing_goes_on_from_the_place_of_any_sequence(packing, lengths, length, stop, chunk):
    documents = numbered(lengths)
    sequences = pack(packing, documents, length)
    if stop >= len(sequences):
        return
    place = sequences[stop - 1].next_place
    rest = pack(packing, documents, length, place.offset, chunk, place.position)
    assert len(rest) == len(sequences) - stop
    for ours, theirs in zip(rest, sequences[stop:], strict=True):
        assert np.array_equal(ours.rows, theirs.rows)
        assert ours.next_place == theirs.next_place
        assert ours.records.tolist() == theirs.records.tolist()


def test_documents_of_like_length_come_at_the_same_time_in_all_lanes():
    rng = np.random.default_rng(0)
    lanes = [pack(one_each, numbered(rng.integers(1, 200, size=64).tolist()), 512) for _ in range(4)]
    together = np.array([[sequence.num_tokens for sequence in lane] for lane in lanes])
    assert together.shape == (4, 64)
    assert together.std(axis=0).mean() < 0.25 * together.std()
    # But lengths do not rise or fall along the way.
    assert abs(np.corrcoef(together[0], np.arange(64))[0, 1]) < 0.4


@pytest.mark.parametrize("packing", [concat, best_fit])
def test_a_cursor_after_the_end_is_damaged(packing):
    with pytest.raises(CheckpointError, match="after the end"):
        pack(packing, [document(0, 1, 2, 3)] * 64, 4, offset=500)


def test_web_like_documents_fill_sequences_and_none_is_cut_that_fits():
    rng, length = np.random.default_rng(0), 2048
    sizes = np.rint(rng.lognormal(6.05, 1.0, size=10_000)).astype(int).clip(1, 50_000).tolist()
    documents = [Document(n, np.zeros(size, np.int32), Status.trained) for n, size in enumerate(sizes)]
    sequences = list(best_fit(in_chunks(documents, 50), 0, Shape(length, 0), ("key",)))
    records = np.concatenate([sequence.records for sequence in sequences])
    assert not ((records["num_tokens"] < records["of_tokens"]) & (records["of_tokens"] <= length)).any()
    assert records["num_tokens"].sum() == sum(sizes)
    assert sum(sizes) >= 0.997 * length * len(sequences)


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
@pytest.mark.parametrize("packing", [concat, best_fit, one_each])
def test_every_token_comes_once_and_sequences_are_those_made_token_by_token(
    packing, contents, length, cut_tokens, chunk
):
    documents = [
        Document(n, np.array(tokens, dtype=np.int32), fate, cut_tokens=cut_tokens)
        if tokens
        else document(n, fate=Status.empty)
        for n, (tokens, fate) in enumerate(contents)
    ]
    seen = {number: [] for number in range(len(documents))}
    for made in in_sequences(packing, in_chunks(documents, chunk, epoch=3), length):
        rows = plain_rows([(documents[one["document"]], one) for one in made.records], made.rows.shape[1])
        assert made.rows.tolist() == rows
        assert made.rows.dtype == np.int32
        assert made.rows.shape[1] <= length
        assert made.num_tokens == sum(made.records["num_tokens"])
        if packing is not concat:
            # What is passed over stands first.
            assert (np.diff(made.records["num_tokens"] > 0, prepend=False) >= 0).all()
        for record in made.records:
            of = documents[record["document"]]
            assert (record["fate"], record["epoch"]) == (of.fate, 3)
            assert (record["sequence"], record["pool"]) == (0, 0)
            assert record["num_tokens"] or record["first_token"] == 0
            assert record["of_tokens"] == (len(of.tokens) + cut_tokens if record["num_tokens"] else 0)
            seen[record["document"]] += range(record["first_token"], record["first_token"] + record["num_tokens"])
    for one in documents:
        kept = one.tokens[:length] if packing is one_each else one.tokens
        assert sorted(seen[one.number]) == list(range(len(kept)))


def test_a_window_ends_where_it_ends_however_documents_come():
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 60, size=700).tolist()
    documents = [Document(n, np.full(size, n, np.int32), Status.trained) for n, size in enumerate(sizes)]

    def places(chunk):
        return [one.next_place for one in best_fit(in_chunks(documents, chunk), 0, Shape(100, 0), ("key",))]

    assert places(1) == places(32) == places(700)
    # What is handed out of a window does not depend on what stands after it, but for what decides where it ends.
    assert len({place.position for place in places(32)}) > 5
