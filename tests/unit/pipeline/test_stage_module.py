"""A stage as a view of the model: same names and tensors. That it trains alike: distributed/test_pipeline_probes.py."""

import pytest
import torch
from torch import nn

from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.stage_module import StageModule
from tests.unit.pipeline.toys import (
    HIDDEN,
    make_toy,
    toy_batch,
)


def view_of(model, stage=range(1, 3), carry=HIDDEN):
    return StageModule(model, find_block_parts(model), stage, carry, {})


def test_names_and_tensors_are_the_models_own():
    model = make_toy()
    model.register_buffer("table", torch.ones(3))
    view = view_of(model)
    for seen, own in (
        (dict(view.model.named_parameters()), dict(model.named_parameters())),
        (dict(view.model.named_buffers()), dict(model.named_buffers())),
    ):
        assert list(seen) == list(own)
        assert all(seen[name] is own[name] for name in own)
    assert view.model.config is model.config
    assert view.model is not model


def test_its_parameters_are_those_of_its_blocks_and_of_what_surrounds_all_blocks():
    model = make_toy(tie_word_embeddings=True)
    names = {id(p): name for name, p in model.named_parameters()}
    held = [names[id(parameter)] for parameter in view_of(model).parameters()]
    around = {"embedding.weight", "norm.weight", "norm.bias"}
    assert set(held) == around | {f"blocks.{i}.linear.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert len(held) == len(set(held))


def test_a_parameter_that_blocks_share_belongs_to_each_of_their_stages():
    model = make_toy()
    for block in model.blocks:
        block.linear = model.blocks[0].linear
    for stage in (range(1), range(1, 4)):
        assert any(parameter is model.blocks[0].linear.weight for parameter in view_of(model, stage).parameters())


def test_hooks_of_a_block_run_once():
    model, calls = make_toy(), []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    view_of(model, range(2)).run(lambda stage: stage(**toy_batch()), None)
    assert calls == ["before", "after"]


def test_switching_a_view_to_evaluation_switches_what_it_copied():
    model = make_toy()
    view = view_of(model)
    view.train(False)
    assert not view.model.norm.training


# ---- forwards ----


def test_a_view_works_again_after_a_failure():
    model, batch = make_toy(), toy_batch()
    view = view_of(model, range(4))
    with pytest.raises(IndexError):
        view.run(lambda stage: stage(input_ids=torch.tensor([[99]])), None)
    assert torch.equal(view.run(lambda stage: stage(**batch).loss, None), model(**batch).loss)


def test_fillers_are_nan_that_takes_no_memory():
    model = make_toy()
    fillers = {"embedding.weight": (torch.Size((32, 8)), torch.bfloat16)}
    view = StageModule(model, find_block_parts(model), range(1, 2), HIDDEN, fillers)
    poison = view.model.embedding.weight
    assert isinstance(poison, nn.Parameter)
    assert not poison.requires_grad
    assert (poison.shape, poison.dtype) == ((32, 8), torch.bfloat16)
    assert poison.isnan().all()
    assert poison.untyped_storage().nbytes() == 2
    assert torch.isfinite(model.embedding.weight).all()
