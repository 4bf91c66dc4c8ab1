"""The names of torch's that pipelines call: a new release that moves one must fail here first."""

import inspect

import pytest
import torch
from torch.distributed.pipelining import _backward, schedules
from torch.utils import _pytree

from hfdist.pipeline.orders import Operation


def test_actions_are_made_and_read_as_we_do():
    kinds = schedules._ComputationType
    action = schedules._Action(3, kinds.FULL_BACKWARD, 5)
    assert (action.stage_index, action.computation_type, action.microbatch_index) == (3, kinds.FULL_BACKWARD, 5)
    assert action.sub_actions is None
    pair = schedules._Action.from_str("(0F1;1B0)OVERLAP_F_B")
    assert [str(single) for single in pair.sub_actions] == ["0F1", "1B0"]
    assert {operation.value for operation in Operation} <= {kind.value for kind in kinds}


def test_sends_and_receives_are_added_between_ranks_alone():
    rank_of_stage = (0, 1, 1)
    computing = {0: ["0F0", "0B0"], 1: ["1F0", "2F0", "2B0", "1B0"]}
    added = schedules._add_send_recv(
        {rank: [schedules._Action.from_str(text) for text in texts] for rank, texts in computing.items()},
        stage_to_rank=rank_of_stage.__getitem__,
        num_stages=3,
    )
    assert {rank: list(map(str, actions)) for rank, actions in added.items()} == {
        0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0"],
        1: ["1RECV_F0", "1F0", "2F0", "2B0", "1B0", "1SEND_B0"],
    }


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_backward.stage_backward_input, ["stage_outputs_or_loss", "output_grads", "input_values", "weights"]),
        (_backward.stage_backward_weight, ["weights", "param_groups"]),
    ],
)
def test_the_functions_that_split_a_backward(function, names):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(names)] == names
    assert all(parameters[name].default is not inspect.Parameter.empty for name in list(parameters)[len(names) :])


def test_a_backward_in_two_parts_gives_the_gradients_of_one():
    """How `Stage` uses them: gradients of inputs are added to theirs; the rest goes to the same parameters later."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    unused = torch.nn.Parameter(torch.zeros(1))
    received = torch.randn(2, 3, requires_grad=True)
    output_grad = torch.randn(2, 3)
    output = layer(received) * 2
    (expected_input,) = torch.autograd.grad(output, [received], output_grad, retain_graph=True)
    expected_weight, expected_bias = torch.autograd.grad(output, list(layer.parameters()), output_grad)

    output = layer(received) * 2
    weights = [*layer.parameters(), unused]
    _, groups = _backward.stage_backward_input([output], [output_grad], [received], iter(weights))
    torch.testing.assert_close(received.grad, expected_input)
    assert layer.weight.grad is None
    _backward.stage_backward_weight(iter(weights), groups)
    torch.testing.assert_close([layer.weight.grad, layer.bias.grad], [expected_weight, expected_bias])
    assert unused.grad is None


def test_a_parameter_that_is_used_twice_in_a_stage():
    """Its two uses make one group, whose graph runs through the groups of what lies between: hence `retain_graph`."""
    torch.manual_seed(0)
    shared, norm = torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)
    weights = [*shared.parameters(), *norm.parameters()]
    received, output_grad = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    expected = torch.autograd.grad(shared(norm(shared(received))), [received, *weights], output_grad)

    output = shared(norm(shared(received)))
    _, groups = _backward.stage_backward_input([output], [output_grad], [received], iter(weights))
    _backward.stage_backward_weight(iter(weights), groups, retain_graph=True)
    torch.testing.assert_close((received.grad, *(weight.grad for weight in weights)), expected)


def test_trees_of_values():
    spec = _pytree.tree_flatten({"a": (1, [2])})[1]
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec
    assert _pytree.tree_unflatten([1, 2], spec) == {"a": (1, [2])}
    assert list(inspect.signature(_pytree.tree_map_only).parameters)[:3] == ["type_or_types_or_pred", "func", "tree"]
    assert _pytree.tree_map_only((int, str), str, {"a": (1, [2.5, "b"])}) == {"a": ("1", [2.5, "b"])}


def test_tensors_count_what_is_written_into_them():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor[0] += 1
    assert tensor._version > before
    assert tensor[1:]._is_view()
    assert not tensor._is_view()


def test_compiled_modules_keep_their_compiled_call_where_stand_ins_drop_it():
    layer = torch.nn.Linear(1, 1)
    assert layer._compiled_call_impl is None
    layer.compile(backend="eager")
    assert layer._compiled_call_impl is not None
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        assert isinstance(getattr(layer, name), dict)
