"""The names of torch's that pipelines override or call: a new release that moves one must fail here first."""

import ast
import inspect
import textwrap

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, _backward, schedules
from torch.utils import _pytree

from hfdist.pipeline.pipeline import _ONE_STAGE, _SEVERAL_STAGES
from hfdist.pipeline.stage import Stage

OVERRIDES = {
    "get_fwd_recv_ops": ["self", "fwd_chunk_id"],
    "forward_one_chunk": ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"],
    "get_fwd_send_ops": ["self", "fwd_chunk_id"],
    "set_local_fwd_input": ["self", "prev_stage_outputs", "mb_index"],
    "get_bwd_recv_ops": ["self", "bwd_chunk_id"],
    "backward_one_chunk": ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"],
    "backward_weight_one_chunk": ["self", "bwd_chunk_id", "last_backward"],
    "get_bwd_send_ops": ["self", "bwd_chunk_id"],
    "get_local_bwd_output": ["self", "mb_index"],
    "set_local_bwd_input": ["self", "next_stage_bwd_outputs", "mb_index"],
    "clear_runtime_states": ["self"],
    "perform_reduce_grad": ["self", "grad_scale_factor"],
}
"""Methods that schedules call."""

SET_UP = {"_prepare_forward_infra", "_prepare_backward_infra", "_warmup_forward_vote", "_warmup_backward_result"}
"""Those that infer shapes or warm up, of which versions of torch have some and we want none."""

KEPT = {
    "__init__",
    "__repr__",
    "has_backward",
    "is_first",
    "is_last",
    "_post_metadata_inference_cleanup",
    "_get_init_p2p_neighbors_ops",
    "scale_grads",
}
"""What schedules use of a stage as torch has it."""


@pytest.mark.parametrize("name", OVERRIDES)
def test_schedules_know_a_stage_by_what_it_overrides(name):
    assert list(inspect.signature(getattr(PipelineStage, name)).parameters) == OVERRIDES[name]
    assert list(inspect.signature(getattr(Stage, name)).parameters) == OVERRIDES[name]


def test_every_override_is_listed():
    own = {name for name, value in vars(Stage).items() if inspect.isfunction(value) and not name.startswith("__")}
    assert {name for name in own if hasattr(PipelineStage, name)} <= set(OVERRIDES) | SET_UP
    assert set(OVERRIDES) | SET_UP <= own


def test_schedules_call_nothing_else_of_a_stage():
    """A new call would reach torch's own stage, which knows nothing of ours."""
    tree = ast.parse(inspect.getsource(schedules))
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("stage", "self._stage", "stage_index_to_stage[stage_idx + 1]")
    }
    assert {"forward_one_chunk", "get_fwd_recv_ops", "set_local_fwd_input"} <= called
    assert called <= set(OVERRIDES) | SET_UP | KEPT


def test_schedules_call_ours_with_the_arguments_that_we_read():
    source = inspect.getsource(schedules)
    for call in (
        "get_fwd_recv_ops(",
        "get_fwd_send_ops(",
        "get_bwd_recv_ops(",
        "get_bwd_send_ops(",
        "full_backward=False",
        "full_backward=True",
        "stage.get_local_bwd_output(mb_index), mb_index",
    ):
        assert call in source


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_backward.stage_backward, ["stage_output", "output_grads", "input_values"]),
        (
            _backward.stage_backward_input,
            ["stage_outputs_or_loss", "output_grads", "input_values", "weights"],
        ),
        (_backward.stage_backward_weight, ["weights", "param_groups"]),
    ],
)
def test_the_functions_that_split_a_backward(function, names):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(names)] == names
    assert all(parameter.default is not inspect.Parameter.empty for parameter in list(parameters.values())[len(names) :])


def test_a_backward_in_two_parts_gives_the_gradients_of_one():
    """How `Stage` uses them: lists in, one gradient for each input; the rest through the same parameters later."""
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
    input_grads, groups = _backward.stage_backward_input([output], [output_grad], [received], iter(weights))
    torch.testing.assert_close(input_grads, (expected_input,))
    assert layer.weight.grad is None
    _backward.stage_backward_weight(iter(weights), groups)
    torch.testing.assert_close([layer.weight.grad, layer.bias.grad], [expected_weight, expected_bias])
    assert unused.grad is None

    layer.zero_grad()
    received.grad = None
    input_grads = _backward.stage_backward((layer(received) * 2,), (output_grad,), [received])
    torch.testing.assert_close(tuple(input_grads), (expected_input,))
    torch.testing.assert_close(layer.weight.grad, expected_weight)


@pytest.mark.parametrize("schedule", [*_ONE_STAGE.values(), *_SEVERAL_STAGES.values()])
def test_schedules_are_made_as_we_make_them(schedule):
    names = list(inspect.signature(schedule.__init__).parameters)
    assert names[1] == ("stage" if schedule in _ONE_STAGE.values() else "stages")
    assert names[2] == "n_microbatches"
    assert {"loss_fn", "scale_grads"} <= set(names)


@pytest.mark.parametrize("base", [schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti])
def test_a_step_is_run_as_we_run_it(base):
    assert {"target", "losses", "return_outputs"} <= set(inspect.signature(base.step).parameters)
    # Targets are cut into one for each micro batch, and the loss is made of the last stage's output.
    loss = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(base._maybe_compute_loss))))
    assert "stage.is_last" in loss
    assert "self._compute_loss(output, target_mbs[mb_index]" in loss


def test_schedules_look_for_receives_from_stages_that_are_not_neighbours():
    assert "args_recv_info" in inspect.getsource(schedules)
    assert "args_recv_info" in inspect.getsource(PipelineStage.__mro__[1])


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
