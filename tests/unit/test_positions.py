"""Which positions a model makes by itself."""

import pytest
import torch

from hfdist.models.positions import all_tokens, counts_from_zero, find_positions, padding_id
from tests.zoo.models import tiny_model


@pytest.mark.parametrize("kind", ["roberta", "xmod", "data2vec-text"])
def test_robertas_family_counts_on_after_its_padding(kind):
    model = tiny_model(kind, num_blocks=1)
    assert not counts_from_zero(model)
    rule = find_positions(model)
    ids = torch.tensor([[5, 6, 7], [8, padding_id(model), 9]])
    assert rule(ids, None, 1).tolist() == [[2, 3, 4], [2, 1, 3]]
    assert rule(ids, torch.tensor([[0, 1, 1]] * 2), 1).tolist() == [[2, 3, 4], [2, 1, 3]]


def test_opt_counts_what_a_mask_shows():
    model = tiny_model("opt", num_blocks=1)
    assert counts_from_zero(model)
    rule = find_positions(model)
    ids = torch.tensor([[5, 6, 7]])
    assert rule(ids, None, 1).tolist() == [[0, 1, 2]]
    assert rule(ids, torch.tensor([[0, 1, 1]]), 1).tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_others_count_all_tokens(kind):
    model = tiny_model(kind, num_blocks=1)
    assert counts_from_zero(model)
    assert find_positions(model) is all_tokens
