"""Prompts and references in held-out items."""

import torch

from hfdist.data.documents.held_out import Example, HeldOutSources, documents_of, split_document, take_examples

_ = -100


def item(ids, labels, positions=None):
    values = {"input_ids": ids, "labels": labels} | ({} if positions is None else {"position_ids": positions})
    return {name: torch.tensor(value) for name, value in values.items()}


def test_the_prompt_ends_before_the_first_target():
    assert split_document([1, 2, 3, 4, 5], [_, _, _, 4, 5]) == Example(prompt=[1, 2, 3], reference=[4, 5])


def test_of_several_answers_the_first_counts():
    labels = [_, _, 3, 4, _, _, 7]
    assert split_document([1, 2, 3, 4, 5, 6, 7], labels) == Example(prompt=[1, 2], reference=[3, 4])


def test_of_plain_text_the_second_half_is_to_be_written():
    assert split_document([1, 2, 3, 4, 5, 6], [_, 2, 3, 4, 5, 6]) == Example(prompt=[1, 2, 3], reference=[4, 5, 6])


def test_what_has_no_target_or_hardly_a_token_is_passed_over():
    assert split_document([1, 2, 3, 4, 5], [_] * 5) is None
    assert split_document([1, 2], [_, 2]) is None


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
