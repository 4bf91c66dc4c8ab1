"""Blocks are compiled where that works; selective checkpointing repeats less than all of a block, to the same bits."""

import gc
import logging
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import OlmoConfig, OlmoForCausalLM

from hfdist.config.train import Recompute
from hfdist.errors import ConfigError
from hfdist.models.blocks import can_compile_blocks, compile_blocks
from hfdist.models.recompute import _contexts, checkpoint_blocks
from tests.unit.tiny import SIZES, llama

TOKENS = torch.arange(48).view(2, 24)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.attention += "scaled_dot_product" in str(function) and "backward" not in str(function)
        return function(*args, **(kwargs or {}))


def gradients(recompute, *, compiled=False):
    torch.manual_seed(0)
    model = llama(attn_implementation="sdpa").train()
    if recompute is Recompute.all:
        model.activation_checkpointing_enable()
    elif recompute is Recompute.cheap:
        checkpoint_blocks(model, Recompute.cheap)
    if compiled:
        compile_blocks(model)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return [p.grad for p in model.parameters()], None
    with Count() as count:
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return [p.grad for p in model.parameters()], count


def test_keeps_attention_and_half_of_the_products():
    plain, once = gradients(None)
    whole, again = gradients(Recompute.all)
    selective, some = gradients(Recompute.cheap)
    for one, other, third in zip(plain, whole, selective, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    assert again.attention == 2 * once.attention
    assert some.attention == once.attention
    repeated = again.products - once.products
    assert repeated >= 2 * 7 - 2
    assert repeated * 0.3 <= some.products - once.products <= repeated * 0.6


@pytest.mark.parametrize("recompute", list(Recompute))
def test_what_is_kept_goes_with_the_step_and_not_with_the_garbage_collector(recompute):
    made, noted = [], (torch.ops.aten.mm, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if function.overloadpacket in noted:
                first = output if isinstance(output, torch.Tensor) else output[0]
                made.append(weakref.ref(first.untyped_storage()))
            return output

    model = llama(attn_implementation="sdpa").train()
    checkpoint_blocks(model, recompute)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()  # what is made once and stays
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with Note():
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        model.zero_grad()
        left = sum(one() is not None for one in made)
    finally:
        gc.enable()
    assert len(made) > 20
    assert left == 0


class Recorded(saved_tensors_hooks):
    """In the place of torch's `save_on_cpu`, which leaves as it is what lies on a CPU."""

    saved: ClassVar = []

    def __init__(self, pin_memory):
        def pack(tensor):
            self.saved.append(tuple(tensor.shape))
            return tensor.clone()

        super().__init__(pack, lambda copy: copy)


@pytest.mark.parametrize("recompute", list(Recompute))
def test_the_inputs_of_blocks_alone_are_offloaded(monkeypatch, recompute):
    plain, _ = gradients(None)
    monkeypatch.setattr("hfdist.models.recompute.save_on_cpu", Recorded)
    monkeypatch.setattr(Recorded, "saved", [])
    torch.manual_seed(0)
    model = llama(attn_implementation="sdpa").train()
    checkpoint_blocks(model, recompute, offloads=True)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    states = (*TOKENS.shape, model.config.hidden_size)
    assert [shape for shape in Recorded.saved if shape != (0,)] == [states] * model.config.num_hidden_layers
    for one, parameter in zip(plain, model.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)


@pytest.fixture
def aot_eager(monkeypatch):
    """The compiler's front end alone, which is where blocks are traced: distributed/test_layouts.py has all of it."""
    compiler = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiler(module, backend="aot_eager"))


def test_compiled_blocks_keep_names_and_gradients(aot_eager):
    model = llama()
    names = list(dict(model.named_parameters()))
    compile_blocks(model)
    assert list(dict(model.named_parameters())) == names
    plain, _ = gradients(None)
    compiled, _ = gradients(None, compiled=True)
    for one, other in zip(plain, compiled, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def clipping_gradients(*, cheap, compiled):
    torch.manual_seed(0)
    model = OlmoForCausalLM(OlmoConfig(**SIZES, clip_qkv=0.01, attn_implementation="sdpa")).train()
    if cheap:
        checkpoint_blocks(model, Recompute.cheap)
    if compiled:
        compile_blocks(model)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return [p.grad for p in model.parameters()]


def test_a_block_that_writes_to_what_is_kept_is_refused():
    with pytest.raises(ConfigError, match="would be wrong") as caught:
        clipping_gradients(cheap=True, compiled=False)
    assert (caught.value.where, caught.value.hint) == ("train.recompute", "train.recompute=all")


def test_a_compiled_block_checkpoints_inside_and_writes_to_nothing(aot_eager):
    plain, compiled = (clipping_gradients(cheap=cheap, compiled=cheap) for cheap in (False, True))
    for one, other in zip(plain, compiled, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_writing_to_a_kept_product_is_refused_and_to_others_is_not(bias):
    first, second = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias)
    given = torch.randn(2, 4, 8, requires_grad=True)

    def writes_to_kept(hidden):
        hidden = first(hidden)
        hidden *= 2.0
        return second(hidden.sin())

    def writes_to_other(hidden):
        hidden = second(first(hidden).sin()) + 0
        hidden *= 2.0
        return hidden.sin()

    with pytest.raises(ConfigError, match="mul_"):
        checkpoint(writes_to_kept, given, use_reentrant=False, context_fn=_contexts)
    found = []
    for contexts in ({}, {"context_fn": _contexts}):
        checkpoint(writes_to_other, given, use_reentrant=False, **contexts).sum().backward()
        found.append(first.weight.grad.clone())
        first.weight.grad = None
    assert torch.equal(*found)


def test_a_compiler_that_fails_means_nothing_is_compiled(caplog):
    model = llama()
    assert can_compile_blocks(model, torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "hfdist"):
        assert not can_compile_blocks(model, torch.device("cuda", 99))
        model.model.layers = nn.Identity()
        assert not can_compile_blocks(model, torch.device("cpu"))
    said = [record.message for record in caplog.records if record.name == "hfdist.models.blocks"]
    assert [line.split(",")[0] for line in said] == ["train.compile: nothing is compiled"] * 2
    assert "blocks cannot be found" in said[1]
