"""What happens where a model calls its blocks: before, inside and after a stage."""

import pytest
import torch

from hfdist.errors import PartitionError
from hfdist.pipeline.stage_forward import BlockPlace, StageEnd, StageForward
from hfdist.pipeline.stage_io import Absent, Activations, Carry, Outputs

HIDDEN = torch.ones(2, 3, 4)
SENT = torch.full((2, 3, 4), 5.0, requires_grad=True)


def stage_forward(blocks, incoming=None, outputs=Outputs.hidden, num_parts=1, is_last=False):
    return StageForward(blocks, num_parts, Carry(outputs, embedding=False), incoming, is_last=is_last)


def end(stage_forward, block, function, *args, part=0, **kwargs):
    """Call the last block of a stage."""
    with pytest.raises(StageEnd):
        call(stage_forward, block, function, *args, part=part, **kwargs)
    return stage_forward.outgoing()


def call(stage_forward, block, function=None, *args, part=0, **kwargs):
    """Call a block as a model does."""
    return stage_forward.call(BlockPlace(block, part), function or unexpected, args or (HIDDEN,), kwargs)


def unexpected(*args, **kwargs):
    raise AssertionError("a block of another stage ran")


def test_stand_ins_return_what_a_block_would():
    structure = (SENT, {"weights": torch.rand(2)}, torch.tensor([3]), torch.tensor([True]), None, "eager")
    before = stage_forward(range(2, 3), Activations({"1.0": structure}))
    hidden, weights, index, flag, nothing, text = call(before, 0)
    assert hidden.isnan().all()
    assert not hidden.requires_grad
    assert weights["weights"].isnan().all()
    assert (nothing, text) == (None, "eager")
    assert flag.item() is True
    # There is no NaN among integers; as an index this one fails.
    with pytest.raises(IndexError):
        torch.arange(10)[index]


def test_what_was_received_may_be_written_into():
    second = stage_forward(range(1, 2), Activations({"0.0": SENT}))
    received = call(second, 0)
    received += 1
    assert (SENT == 5).all()
    received.sum().backward()
    assert (SENT.grad == 1).all()


def two_outputs(hidden):
    return hidden + 1, (hidden * 2, torch.tensor([4]))


def test_only_hidden_states_travel_unless_more_is_asked():
    outputs = {}
    for choice in Outputs:
        ran = stage_forward(range(2), outputs=choice)
        call(ran, 0, two_outputs)
        outputs[choice] = end(ran, 1, two_outputs).outputs
    hidden, (second, index) = outputs[Outputs.hidden]["1.0"]
    assert torch.equal(hidden, HIDDEN + 1)
    assert second == Absent((2, 3, 4), torch.float32)
    assert index.item() == 4
    assert list(outputs[Outputs.last]) == ["1.0"]
    assert torch.equal(outputs[Outputs.last]["1.0"][1][0], HIDDEN * 2)
    assert list(outputs[Outputs.history]) == ["0.0", "1.0"]
    assert torch.equal(outputs[Outputs.history]["0.0"][1][0], HIDDEN * 2)


@pytest.mark.parametrize("outputs", [Outputs.hidden, Outputs.history])
def test_outputs_that_change_before_they_travel_are_refused(outputs):
    """The model changes them in the next stage too, so it would happen twice."""
    first = stage_forward(range(2), outputs=outputs)
    call(first, 0, lambda hidden: hidden + 1).add_(1)
    with pytest.raises(StageEnd):
        call(first, 2)
    with pytest.raises(PartitionError, match="writes into what its blocks returned"):
        first.outgoing()


# ---- what blocks leave in the caller's containers ----


def write(hidden, cache, *, history):
    cache["keys"] = (hidden + 1, None)
    cache["count"] = 1
    history.append(hidden * 2)
    return hidden


def test_entries_that_blocks_write_travel():
    entries = end(stage_forward(range(1)), 0, write, HIDDEN, {"given": HIDDEN}, history=[HIDDEN]).entries
    # By place or name of the argument; neither what the caller had given nor what holds no tensor.
    assert list(entries) == ["1", "history"]
    assert list(entries["1"]) == ["keys"]
    assert torch.equal(entries["1"]["keys"][0], HIDDEN + 1)
    assert list(entries["history"]) == [1]


def test_entries_are_there_when_the_first_own_block_runs():
    entries = {"1": {"keys": SENT}, "history": {1: SENT}}
    second = stage_forward(range(2, 3), Activations({"1.0": SENT}, entries))
    cache, history = {}, []
    call(second, 0, None, HIDDEN, cache, history=history)
    assert (cache, history) == ({}, [])
    call(second, 1, None, HIDDEN, cache, history=history)
    assert cache["keys"] is SENT
    assert history == [None, SENT]
    onward = end(second, 2, write, HIDDEN, cache, history=history).entries
    assert torch.equal(onward["1"]["keys"][0], HIDDEN + 1)
    assert list(onward["history"]) == [1, 2]
    # What was received is not changed: another forward may need it.
    assert entries == {"1": {"keys": SENT}, "history": {1: SENT}}


def test_models_cannot_catch_the_end_of_a_stage():
    assert not issubclass(StageEnd, Exception)
