"""A backward in two halves gives the gradients of one."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hfdist.pipeline.split_backward import backward_inputs


class Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Case:
    """A graph of two inputs, and parameters that are used in one odd way."""

    def __init__(self):
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.table = nn.Parameter(torch.randn(2, 3, 4))
        self.unused = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.inputs = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(2)]
        self.inputs.append(torch.ones(3, dtype=torch.int64))
        modules = [*self.first.parameters(), *self.second.parameters(), *self.norm.parameters()]
        self.parameters = [*modules, self.table, self.unused, self.frozen]

    def chain(self, x, y, z):
        return [self.second(self.norm(self.first(x)).tanh()) * y]

    def used_twice(self, x, y, z):
        return [self.first(self.norm(self.first(x + y))) @ self.first.weight]

    def used_twice_with_another_between(self, x, y, z):
        return [self.second(self.first(self.norm(self.second(self.first(x)))))]

    def overlapping_uses(self, x, y, z):
        """Three uses of parameters of which each shares one with the next."""
        one, two, three = self.norm.weight, self.norm.bias, self.second.weight[0]
        return [torch.tanh(x * (one + three)) * (two + three)]

    def several_roots(self, x, y, z):
        hidden = self.first(x)
        return [hidden * 2, self.norm(hidden) + y, self.second(self.norm(y))]

    def root_beside_the_path(self, x, y, z):
        bias = self.second(self.table.tanh())
        return [self.norm(x + bias), bias * 3]

    def vector_on_and_beside_the_path(self, x, y, z):
        bias = self.second(self.table.tanh())
        return [self.norm(x + bias), self.norm(bias)]

    def vector_alone_and_in_a_matrix(self, x, y, z):
        return [self.norm(x @ (self.second.weight * self.norm.weight))]

    def side_by_side(self, x, y, z):
        hidden = self.norm(x)
        return [self.first(hidden) * self.second(hidden)]

    def nothing_but_parameters(self, x, y, z):
        return [self.first(self.table)]

    def an_input_goes_through(self, x, y, z):
        return [self.norm(x), y * 1]

    def added_as_it_is(self, x, y, z):
        """The gradient of the table is the very tensor that goes on to the input."""
        return [x + self.table]

    def cast(self, x, y, z):
        hidden = nn.functional.linear(x.bfloat16(), self.first.weight.bfloat16(), self.first.bias.bfloat16())
        return [hidden.float() * self.frozen]

    def several_outputs_of_one_node(self, x, y, z):
        one, two = self.first(x).split(2, dim=-1)
        query, key = (torch.stack([self.table, y]) @ self.second.weight).unbind(0)
        return [one * two, query * key]

    def no_gradient_arrives(self, x, y, z):
        return [self.second(Blocked.apply(self.first(x)))]

    def not_used(self, x, y, z):
        return [self.first(x)]


NAMES = [name for name in vars(Case) if not name.startswith("_")]


def gradients(case):
    return [tensor.grad for tensor in (*case.inputs, *case.parameters)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_same_gradients_as_in_one_go(name, num_microbatches):
    whole, halved = Case(), Case()
    deferred = []
    for number in range(num_microbatches):
        torch.manual_seed(number)
        roots = getattr(whole, name)(*whole.inputs)
        root_gradients = [torch.randn_like(root) for root in roots]
        torch.autograd.backward(roots, [gradient.clone() for gradient in root_gradients])
        deferred.append(backward_inputs(getattr(halved, name)(*halved.inputs), root_gradients, halved.inputs))
    assert all(parameter.grad is None for parameter in halved.parameters if parameter.dim() > 1)
    torch.testing.assert_close([t.grad for t in halved.inputs], [t.grad for t in whole.inputs])
    for rest in deferred:
        rest()
    torch.testing.assert_close(gradients(halved), gradients(whole), rtol=1e-5, atol=1e-6)


def test_a_loss_needs_no_gradient():
    whole, halved = Case(), Case()
    whole.chain(*whole.inputs)[0].sum().backward()
    backward_inputs([halved.chain(*halved.inputs)[0].sum()], None, halved.inputs)()
    torch.testing.assert_close(gradients(halved), gradients(whole))


def test_gradients_of_vectors_come_with_the_first_half():
    case = Case()
    backward_inputs([case.chain(*case.inputs)[0].sum()], None, case.inputs)
    has_gradient = {name for name in ("norm", "first", "second") if getattr(case, name).weight.grad is not None}
    assert has_gradient == {"norm"}


@pytest.mark.parametrize(("name", "number"), [("side_by_side", 1), ("chain", 2)])
def test_branches_that_cannot_reach_each_other_share_a_call(monkeypatch, name, number):
    case, calls, backward = Case(), [], torch.autograd.backward
    rest = backward_inputs([getattr(case, name)(*case.inputs)[0].sum()], None, case.inputs)
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **named: calls.append(backward(*args, **named)))
    rest()
    assert len(calls) == number


class Marker:
    """Can be referred to weakly."""


def test_the_graph_is_freed_with_the_second_half():
    case, marker = Case(), Marker()
    hidden = case.first(case.inputs[0])
    rest = backward_inputs([hidden.exp().sum()], None, case.inputs)
    hidden.grad_fn.metadata["probe"], kept = marker, weakref.ref(marker)
    gc.disable()
    try:
        del hidden, marker
        rest()
        del rest
        assert kept() is None
    finally:
        gc.enable()
