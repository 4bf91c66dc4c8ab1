"""Put documents end to end into sequences of equal length, so that they never see each other.

documents   a a a |  b b b b b | c c
input_ids   a a a b | b b b b | c c ...
position    0 1 2 0 | 0 1 2 3 | 0 1          restarts: models of transformers then mask across documents
labels      . a a . | b b b b | . c          . is ignored: a first token is not predicted from another document
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""Label of a position that is not a target."""

INPUT_IDS, POSITION_IDS, LABELS = range(3)
NAMES = ("input_ids", "position_ids", "labels")


def empty_sequence(length_tokens: int) -> NDArray[np.int32]:
    """Room for one sequence: rows input_ids, position_ids and labels, shape [3, length]."""
    return np.empty((3, length_tokens), dtype=np.int32)


def put(sequence: NDArray[np.int32], filled: int, tokens: NDArray[np.int32], offset: int) -> int:
    """Copy as much of a document as fits.

    Args:
        sequence: from `empty_sequence`, changed in place.
        filled: tokens that it holds already.
        tokens: the whole document.
        offset: first token of the document that has not been used.

    Returns:
        Number of tokens taken.
    """
    taken = min(sequence.shape[1] - filled, len(tokens) - offset)
    place = slice(filled, filled + taken)
    sequence[INPUT_IDS, place] = sequence[LABELS, place] = tokens[offset : offset + taken]
    sequence[POSITION_IDS, place] = np.arange(taken)
    if offset == 0 and taken > 0:
        sequence[LABELS, filled] = IGNORED
    return taken
