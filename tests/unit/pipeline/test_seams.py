"""The names of torch's that pipelines call: a new release that moves one must fail here first."""

import inspect

import torch
from torch.distributed.pipelining import schedules
from torch.utils import _pytree

from hfdist.pipeline.schedule import Operation


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
