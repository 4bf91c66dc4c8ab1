"""Packing on literals, and its laws on documents of any length."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.data.order.cursor import Place
from hfdist.data.order.records import Status
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, POSITION_IDS, Shape, ids_and_labels
from hfdist.data.packing.windows import best_fit, one_each
from hfdist.data.sources.document_batch import Document
from hfdist.errors import CheckpointError, DataError
from tests.unit.data.document_batches import columns, in_chunks

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
        return list(concat(iter(placed), Shape(length, FILL)))
    return list(packing(iter(placed), offset, Shape(length, FILL), ("key",)))


def test_two_documents_in_one_sequence():
    (sequence,) = pack(concat, [document(5, 7, 8, 9), document(6, 4, 5, 6)], 6)
    assert sequence.rows.tolist() == [[7, 8, 9, 4, 5, 6], [0, 1, 2, 0, 1, 2], [IGNORED, 8, 9, IGNORED, 5, 6]]
    assert sequence.next_place == Place(0, 2, 0)
    of = sequence.records[["document", "first_token", "num_tokens", "of_tokens"]]
    assert of.tolist() == [(5, 0, 3, 3), (6, 0, 3, 3)]


def test_a_document_goes_on_in_the_next_sequence_with_new_positions():
    first, second = pack(concat, [document(0, 3, 4, 5, 6, 7, 8, 9)], 4)
    assert first.rows[LABELS].tolist() == [IGNORED, 4, 5, 6]
    assert first.next_place == Place(0, 0, 4)
    # Filled up, where the documents end.
    assert second.rows.tolist() == [[7, 8, 9, FILL], [0, 1, 2, 0], [IGNORED, 8, 9, IGNORED]]
    assert second.num_tokens == 3


def test_a_quarantined_document_keeps_its_place_without_values_and_targets():
    documents = [document(0, 1, 2), document(1, 3, 4, 5, fate=Status.quarantined), document(2, 6, 7, 8)]
    (with_it,) = pack(concat, documents, 8)
    assert with_it.rows.tolist() == [
        [1, 2, FILL, FILL, FILL, 6, 7, 8],
        [0, 1, 0, 1, 2, 0, 1, 2],
        [IGNORED, 2, IGNORED, IGNORED, IGNORED, IGNORED, 7, 8],
    ]


def test_what_is_passed_over_is_recorded_with_the_sequence_in_which_it_comes():
    held_out, torn = document(1, fate=Status.held_out), document(3, fate=Status.bad, error=DataError("torn"))
    first, second = pack(concat, [document(0, 1, 2), held_out, document(2, 3, 4), torn, document(4, 5, 6)], 4)
    assert first.records["document"].tolist() == [0, 1, 2]
    assert first.records["fate"].tolist() == [Status.trained, Status.held_out, Status.trained]
    assert second.records["document"].tolist() == [3, 4]
    assert first.problems == ()
    assert second.problems == ("Data error: torn",)
    assert second.records["num_tokens"].tolist() == [0, 2]


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
        assert sequence.problems == tuple(f"Data error: row {number}" for number in bad["document"])
    assert sum(len(sequence.problems) for sequence in sequences) == 140
    # Of several windows.
    assert sum(bool(sequence.problems) for sequence in sequences) > 3


def test_tokens_of_several_types_share_a_sequence():
    """Token files of two sources: ids that fit two bytes, and complements."""
    wide = columns([document(0, 7, ~8, 9)])
    narrow = replace(columns([document(1, 1, 2, 3)]), tokens=[np.array([5, 5, 5, 1, 2, 65_000], dtype=np.uint16)])
    for packing in (best_fit, one_each):
        sequences = list(packing(iter([(Place(0, 0), wide), (Place(0, 1), narrow)]), 0, Shape(6, FILL), ("key",)))
        ids = [one.rows[INPUT_IDS].tolist() for one in sequences]
        assert sorted(token for row in ids for token in row if token != FILL) == [1, 2, 7, 8, 9, 65_000]


lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]), min_size=1, max_size=60)


@given(lengths=lengths, length=st.sampled_from([4, 8, 11, 16]), chunk=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("packing", [concat, best_fit, one_each])
def test_every_token_comes_once_as_its_record_says_with_the_right_targets(packing, lengths, length, chunk):
    documents = numbered(lengths)
    sequences = pack(packing, documents, length, chunk=chunk)
    seen = []
    for sequence in sequences:
        filled = 0
        for record in sequence.records:
            first, num_tokens = int(record["first_token"]), int(record["num_tokens"])
            span = slice(filled, filled + num_tokens)
            tokens = documents[record["document"]].tokens[first : first + num_tokens]
            assert sequence.rows[INPUT_IDS, span].tolist() == tokens.tolist()
            assert sequence.rows[POSITION_IDS, span].tolist() == list(range(num_tokens))
            # Not the first: what stands before it is of another document, or of another sequence.
            assert sequence.rows[LABELS, span].tolist() == [IGNORED, *tokens[1:].tolist()][:num_tokens]
            seen += tokens.tolist()
            filled += num_tokens
        assert sequence.num_tokens == filled
        assert (sequence.rows[LABELS, filled:] == IGNORED).all()
        assert sequence.rows.shape[1] <= length
    kept = [one.tokens[:length] if packing is one_each else one.tokens for one in documents]
    assert sorted(seen) == sorted(np.concatenate(kept).tolist())
    recorded = [int(number) for sequence in sequences for number in sequence.records["document"]]
    assert set(recorded) == set(range(len(documents)))


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
def test_a_cursor_behind_the_end_is_damaged(packing):
    with pytest.raises(CheckpointError, match="behind the end"):
        pack(packing, [document(0, 1, 2, 3)] * 64, 4, offset=500)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_tokens_of_a_file_have_labels_too(dtype):
    ids, labels = ids_and_labels(np.array([5, 65_000], dtype=dtype))
    assert ids.tolist() == labels.tolist() == [5, 65_000]
