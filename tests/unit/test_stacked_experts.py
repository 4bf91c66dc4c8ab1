"""Stacked experts compute in autocast's type, as linear layers do, and in float32 as transformers lets them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments

import hfdist
from hfdist.models.stacked_experts import use_products
from hfdist.planning.tracing.trace import Trace
from tests.zoo.models import tiny_batch, tiny_model


class Products(TorchDispatchMode):
    """Types of the factors of grouped products."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_mm" in func.__name__:
            self.types |= {tensor.dtype for tensor in args[:2]}
        return func(*args, **(kwargs or {}))


def gradients(model, batch, *, half):
    model.zero_grad()
    with Products() as products, torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(**batch).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, products.types


def kept_bytes(model, batch):
    """What a forward under autocast keeps for its backward, without the parameters."""
    with Trace() as trace, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(**batch).loss
        assert loss.requires_grad
        return trace.held.total - trace.held.weights


def distance(found, expected):
    """Of all gradients together."""
    flat = [torch.cat([of[name].flatten() for name in expected]) for of in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_compute_in_the_type_of_autocast(kind):
    model = tiny_model(kind)
    batch = tiny_batch(model)
    model.set_experts_implementation("grouped_mm")
    whole = gradients(model, batch, half=False)
    alone = gradients(model, batch, half=True)
    assert alone[2] == {torch.float32}, "autocast knows grouped products now: models/stacked_experts.py may do less"
    before = kept_bytes(model, batch)
    use_products(model)
    # No copies of the stacks.
    assert kept_bytes(model, batch) <= before
    assert torch.equal(gradients(model, batch, half=False)[0], whole[0])
    loss, found, types = gradients(model, batch, half=True)
    assert types == {torch.bfloat16}
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    # As far from float32 as where each expert is a linear layer, which autocast knows.
    model.set_experts_implementation("eager")
    by_layers = gradients(model, batch, half=True)
    assert abs(loss - whole[0]) < 2 * abs(by_layers[0] - whole[0]) + 1e-3
    assert distance(found, whole[1]) < 1.2 * distance(by_layers[1], whole[1]) + 1e-3


def test_a_trainer_from_python_lets_them(tmp_path):
    model = tiny_model("qwen3_moe")
    rows = [{name: values[0].tolist() for name, values in tiny_batch(model).items()}]
    args = TrainingArguments(
        str(tmp_path),
        bf16=True,
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
    )
    trainer = hfdist.Trainer(model, args, train_dataset=rows, strategy="single")
    with Products() as products:
        trainer.train()
    assert products.types == {torch.bfloat16}


def test_experts_of_any_width_compute_under_autocast():
    model = tiny_model("qwen3_moe", moe_intermediate_size=20)
    batch = tiny_batch(model)
    whole = gradients(model, batch, half=False)
    use_products(model)
    # A grouped product in 16 bits takes multiples of 8: that of 20 columns stays in float32.
    loss, _, types = gradients(model, batch, half=True)
    assert types == {torch.bfloat16, torch.float32}
    assert loss == pytest.approx(float(whole[0]), abs=0.05)
