"""Portions that were parted are whole again behind each other."""

from dataclasses import replace

import numpy as np

from hfdist.data.order.records import Status
from hfdist.data.sources.document_batch import Document, DocumentBatch
from hfdist.errors import DataError
from tests.unit.data.document_batches import columns

BAD = {1, 4}


def test_parts_of_a_batch_behind_each_other_are_the_batch():
    errors = {number: DataError(f"row {number}") for number in BAD}
    documents = [
        Document(
            10 + n,
            np.arange(0 if n in BAD else n + 1),
            Status.bad if n in BAD else Status.trained,
            errors.get(n),
            n,
        )
        for n in range(6)
    ]
    whole = columns(documents)
    for place in range(1, len(documents)):
        joined = DocumentBatch.join([whole.part(0, place), whole.part(place, len(documents))])
        assert joined.errors == errors
        for ours, theirs in zip(joined.documents(), documents, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert replace(ours, tokens=None) == replace(theirs, tokens=None)
