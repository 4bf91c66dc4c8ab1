"""A stage as a view of the model: same names and tensors, the model's own code, the same loss and gradients."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist.models.blocks import find_block_parts
from hfdist.models.build import initialize_by_name
from hfdist.pipeline.stage_module import StageModule
from tests.unit.pipeline import toys
from tests.unit.pipeline.staging import cut_stages, staged_step, whole_step
from tests.unit.pipeline.toys import (
    EMBEDDING,
    EVERYTHING,
    HALVES,
    HIDDEN,
    NEEDED,
    QUARTERS,
    THIRDS,
    make_toy,
    toy_batch,
)


def view_of(model, stage=range(1, 3), carry=HIDDEN):
    return StageModule(model, find_block_parts(model), stage, carry, {})


# ---- the same mathematics ----


def assert_same_step(make, stages, carry, batch):
    loss, gradients = whole_step(make(), batch)
    staged_loss, staged_gradients = staged_step(cut_stages(make, stages, carry), carry, batch)
    assert torch.equal(staged_loss, loss)
    # A parameter that no stage has used keeps no gradient, as in one piece.
    assert set(staged_gradients) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(staged_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("stages", [THIRDS, QUARTERS])
@pytest.mark.parametrize("kind", NEEDED)
def test_stages_compute_what_the_model_computes(kind, stages):
    assert_same_step(lambda: make_toy(kind), stages, NEEDED[kind], toy_batch())


@pytest.mark.parametrize("kind", [kind for kind in NEEDED if kind is not toys.WritesInPlace])
def test_more_than_what_is_needed_may_travel(kind):
    assert_same_step(lambda: make_toy(kind), HALVES, EVERYTHING, toy_batch())


@pytest.mark.parametrize("carry", [HIDDEN, EMBEDDING])
def test_a_tied_head_adds_to_the_gradient_of_the_embedding(carry):
    assert_same_step(lambda: make_toy(tie_word_embeddings=True), HALVES, carry, toy_batch())


def make_llama(**config):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"num_hidden_layers": 4, "vocab_size": 32} | config))
    initialize_by_name(model, seed=0)
    return model.train()


def test_gradient_checkpointing_runs_only_own_blocks_again():
    def make():
        model = make_llama()
        model.gradient_checkpointing_enable()
        return model

    runs = []
    cuts = cut_stages(make, HALVES, HIDDEN)
    for cut in cuts:
        for index, (block,) in enumerate(cut.blocks):
            block.mlp.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    loss, gradients = staged_step(cuts, HIDDEN, toy_batch())
    assert sorted(runs) == [0, 0, 1, 1, 2, 2, 3, 3]
    expected_loss, expected = whole_step(make_llama(), toy_batch())
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)


def test_a_model_with_a_cache_trains():
    """Llama makes a cache in its forward where `use_cache` is set, as it is by default."""
    assert_same_step(lambda: make_llama(use_cache=True), HALVES, HIDDEN, toy_batch())


# ---- what a view is made of ----


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


def test_stand_ins_keep_the_class_and_the_attributes_of_their_blocks():
    model = make_toy()
    model.blocks[3].layer_type = "sliding"
    view = view_of(model)
    for stand_in, block in zip(view.model.blocks, model.blocks, strict=True):
        assert type(stand_in) is type(block)
        assert stand_in is not block
        assert (stand_in.index, stand_in.scale) == (block.index, block.scale)
        assert stand_in.linear is block.linear
    assert view.model.blocks[3].layer_type == "sliding"
    # The model itself is left as it was.
    assert torch.isfinite(model(**toy_batch()).loss)


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


@pytest.mark.parametrize("kind", [kind for kind, needed in NEEDED.items() if needed != HIDDEN])
def test_what_does_not_travel_turns_the_loss_into_nan(kind):
    (first, second), batch = cut_stages(lambda: make_toy(kind), HALVES, HIDDEN), toy_batch()
    activations = first.stage_module(0, HIDDEN).run(lambda model: model(**batch), None)
    assert second.stage_module(1, HIDDEN).run(lambda model: model(**batch).loss, activations).isnan()


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
    assert (poison.shape, poison.dtype) == ((32, 8), torch.bfloat16)
    assert poison.isnan().all()
    assert poison.untyped_storage().nbytes() == 2
    assert torch.isfinite(model.embedding.weight).all()
