"""`zero_grad` from a list drops what torch's own would, of a copy the copy's own, and only for a while."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hfdist.trainer.step.listed_gradients import zeroing_from_list


class Own(nn.Linear):
    """Has more to do, as DeepSpeed's engine."""

    def zero_grad(self, set_to_none=True):
        self.was_called = True


def with_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def gradients(model):
    return [None if one.grad is None else float(one.grad.sum()) for one in model.parameters()]


def test_drops_gradients_or_makes_them_zero():
    model = with_gradients(nn.Linear(2, 3))
    with zeroing_from_list(model, list(model.parameters())):
        model.zero_grad(set_to_none=False)
        assert gradients(model) == [0, 0]
        model.zero_grad()
        assert gradients(model) == [None, None]
    assert "zero_grad" not in vars(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_drops_its_own_and_those_that_it_gets_later(copied):
    model = with_gradients(nn.Linear(2, 3))
    with zeroing_from_list(model, list(model.parameters())):
        other = with_gradients(copied(model))
    other.later = nn.Parameter(torch.ones(1))
    with_gradients(other).zero_grad()
    assert (gradients(model), gradients(other)) == ([6, 3], [None, None, None])
    with_gradients(copied(other)).zero_grad(set_to_none=False)
    assert gradients(other) == [None, None, None]


def test_a_model_with_a_method_of_its_own_keeps_it():
    model = Own(2, 3)
    with zeroing_from_list(model, []):
        model.zero_grad()
    assert model.was_called
