"""Prompts and references in held-out items."""

import pytest
import torch

from hfdist.data.documents.examples import Example, documents_of, split_document, take_examples
from hfdist.data.documents.held_out import HeldOutSources

_ = -100


def item(ids, labels, positions=None):
    values = {"input_ids": ids, "labels": labels} | ({} if positions is None else {"position_ids": positions})
    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([_, _, _, 4, 5], ([1, 2, 3], [4, 5])),
        ([_, _, 3, 4, _, _, 7], ([1, 2], [3, 4])),
        ([_, 2, 3, 4, 5, 6], ([1, 2, 3], [4, 5, 6])),
        ([_, 2, 3, 4, _, _, _, _], ([1, 2], [3, 4])),
        ([_, 2, 3, _, _, _, 7, 8], ([1], [2, 3])),
        ([_] * 5, None),
        ([_, 2], None),
    ],
    ids=[
        "an answer",
        "of several the first",
        "of text the second half",
        "of filled text, too",
        "an answer to one token",
        "no target",
        "hardly a token",
    ],
)
def test_a_prompt_and_what_is_to_be_written(labels, expected):
    example = split_document(list(range(1, len(labels) + 1)), labels)
    assert example == (expected and Example(prompt=expected[0], reference=expected[1]))


def test_documents_begin_where_positions_restart():
    packed = item([1, 2, 3, 4, 5, 0, 0], [_, 2, _, 4, 5, _, _], [0, 1, 0, 1, 2, 0, 1])
    assert list(documents_of(packed)) == [([1, 2], [_, 2]), ([3, 4, 5], [_, 4, 5]), ([0, 0], [_, _])]
    assert list(documents_of(item([1, 2], [_, 2]))) == [([1, 2], [_, 2])]


def test_each_source_has_its_share():
    parts = {
        name: [item([base, 1, 2, 3, 4], [_, _, 2, 3, 4], [0, 1, 2, 3, 4])] * 5 for name, base in (("a", 10), ("b", 20))
    }
    taken = take_examples(HeldOutSources(parts), 5)
    assert [example.prompt[0] for example in taken] == [10, 10, 10, 20, 20]
    assert len(take_examples(parts["a"], 99)) == 5
