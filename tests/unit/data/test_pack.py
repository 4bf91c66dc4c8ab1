"""Packing on literals."""

import numpy as np

from hfdist.data.pack import IGNORED, empty_sequence, put


def tokens(*ids):
    return np.array(ids, dtype=np.int32)


def test_two_documents_in_one_sequence():
    sequence = empty_sequence(6)
    taken = put(sequence, 0, tokens(7, 8, 9), 0)
    assert taken == 3
    assert put(sequence, 3, tokens(4, 5, 6, 7), 0) == 3
    assert sequence.tolist() == [
        [7, 8, 9, 4, 5, 6],
        [0, 1, 2, 0, 1, 2],
        [IGNORED, 8, 9, IGNORED, 5, 6],
    ]


def test_a_document_goes_on_in_the_next_sequence_with_new_positions_and_all_its_targets():
    sequence = empty_sequence(4)
    assert put(sequence, 0, tokens(4, 5, 6, 7, 8, 9), 3) == 3
    assert sequence[:, :3].tolist() == [[7, 8, 9], [0, 1, 2], [7, 8, 9]]


def test_nothing_left_takes_nothing():
    sequence = empty_sequence(4)
    assert put(sequence, 1, tokens(4, 5), 2) == 0
