"""Every type, split at its blocks, trains exactly as the whole model, or is refused for a known reason."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from hfdist.config.strategy import Schedule
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.generation_check import find_generation_problem
from hfdist.pipeline.infer_stage_io import infer_stage_io
from hfdist.pipeline.split import split_at_blocks
from hfdist.pipeline.stage_io import Absent
from hfdist.strategies.mesh import build_mesh
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_use_cache
from tests.marks import many
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import (
    CPU,
    NEEDS_MORE_THAN_TEXT,
    RECOMPUTES,
    REFUSED,
    even_stages,
    group_of_one,
    run_whole,
    split_model,
    split_type,
)

pytestmark = pytest.mark.zoo

NUM_BLOCKS = 6
HALVES = even_stages(NUM_BLOCKS, 2)
SEVERAL_KINDS = ("llama", "gemma3n_text", "zamba2", many("gpt2"), many("mixtral"))


@pytest.fixture(scope="module", autouse=True)
def _group():
    with group_of_one():
        yield


def two_batches(model):
    """Of different lengths."""
    return [tiny_batch(model, seed=1), tiny_batch(model, seed=2, tokens=24)]


def test_a_split_model_trains_as_the_whole(model_type):
    """In two and three stages, with weight gradients apart and with fused attention; ranks agree on what travels."""
    model = tiny_model(model_type)
    batches = two_batches(model)
    whole = run_whole(model, batches)
    halves = split_model(model, HALVES, batches, whole=whole)
    if model_type in REFUSED:
        assert halves.verdict == "refused", halves
        assert REFUSED[model_type] in halves.reason
        return
    for outcome in (
        halves,
        split_model(model, even_stages(NUM_BLOCKS, 3), batches, whole=whole),
        split_model(model, HALVES, batches, whole=whole, schedule=Schedule.interleaved_zero_bubble),
    ):
        assert outcome.verdict == "exact", outcome
    if model_type not in NEEDS_MORE_THAN_TEXT:
        cut = split_at_blocks(model, find_block_parts(model), HALVES, range(len(HALVES)))
        found = infer_stage_io(cut, (0, 0), Topology(), build_mesh(Topology()))
        assert found.carry.describe() == halves.travels
    if model._supports_sdpa:
        fused = tiny_model(model_type, attention="sdpa")
        assert fused.config._attn_implementation == "sdpa"
        outcome = split_model(fused, HALVES, batches)
        assert outcome.verdict == "exact", outcome


@pytest.mark.parametrize("kind", ["llama", "gemma3n_text", "zamba2"])
def test_at_every_block(kind):
    model = tiny_model(kind)
    batches = two_batches(model)
    whole = run_whole(model, batches)
    for first_stage in range(1, NUM_BLOCKS):
        stages = (range(first_stage), range(first_stage, NUM_BLOCKS))
        outcome = split_model(model, stages, batches, whole=whole)
        assert outcome.verdict == "exact", outcome


@pytest.mark.parametrize("kind", SEVERAL_KINDS)
def test_with_gradient_checkpointing(kind):
    model, found = tiny_model(kind), []
    batches, calls = two_batches(model), count_calls(model)
    for _ in range(2):
        outcome = split_model(model, HALVES, batches)
        assert outcome.verdict == "exact", outcome
        found.append(calls.copy())
        calls.clear()
        model.activation_checkpointing_enable({"use_reentrant": False})
    # What is in a block ran again in the backward.
    assert all(found[1][index] > found[0][index] for index in range(NUM_BLOCKS))


def count_calls(model):
    """Count, from now on, how often the modules inside each block run."""
    calls = Counter()
    for index, block in enumerate(find_block_parts(model)):
        for module in (module for part in block for module in part.modules()):
            module.register_forward_hook(lambda *_, index=index: calls.update([index]))
    return calls


@pytest.mark.parametrize("kind", ["llama", "zamba2"])
def test_with_weights_of_half_precision(kind):
    model = tiny_model(kind).to(torch.bfloat16)
    outcome = split_model(model, HALVES, two_batches(model))
    assert outcome.travels
    assert outcome.loss_difference <= 3e-2
    assert outcome.gradient_difference <= 3e-2, outcome


def switch_on_dropout(model):
    """With random numbers that depend on the micro batch and the block alone: see `seeded_loss`."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        for name, value in vars(module).items():
            if isinstance(value, float) and name.endswith("dropout"):
                setattr(module, name, 0.2)
    for index, block in enumerate(find_block_parts(model)):
        block[0].register_forward_pre_hook(partial(seed_block, index))


def seed_block(index, *_):
    torch.manual_seed(torch.initial_seed() // 100 * 100 + index + 1)


def seeded_loss(model, batch):
    torch.manual_seed(100 * int(batch["input_ids"].sum()))
    return model(**batch).loss


@pytest.mark.parametrize("kind", ["gpt2", "gemma3n_text", many("xlm")])
def test_with_dropout(kind):
    model = tiny_model(kind)
    batches = two_batches(model)
    without = run_whole(model, batches, seeded_loss)
    switch_on_dropout(model)
    assert run_whole(model, batches, seeded_loss).losses != without.losses
    outcome = split_model(model, HALVES, batches, loss=seeded_loss)
    assert outcome.verdict == "exact", outcome


def packed(batch):
    """Two documents in each row, told apart by their positions alone."""
    sequences, tokens = batch["input_ids"].shape
    positions = torch.cat([torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)])
    rest = {name: value for name, value in batch.items() if name != "attention_mask"}
    return rest | {"position_ids": positions.expand(sequences, tokens).contiguous()}


def left_padded(batch):
    """Rows of different lengths that end together."""
    mask = batch["attention_mask"].clone()
    mask[0, :3] = 0
    mask[1, :7] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def masked_pair_by_pair(batch):
    """Each token sees the last four."""
    sequences, tokens = batch["input_ids"].shape
    place = torch.arange(tokens)
    distance = place[:, None] - place[None, :]
    sees = (distance >= 0) & (distance < 4)
    mask = torch.zeros(sequences, 1, tokens, tokens).masked_fill(~sees, torch.finfo(torch.float32).min)
    return batch | {"attention_mask": mask}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("llama", change) for change in (packed, left_padded, masked_pair_by_pair)),
        *(("gemma2", masked_pair_by_pair), ("mixtral", packed), ("qwen3", left_padded)),
    ],
)
def test_with_what_the_model_takes_besides_tokens(kind, change):
    model = tiny_model(kind)
    plain = two_batches(model)
    batches = [change(batch) for batch in plain]
    assert run_whole(model, batches).losses != pytest.approx(run_whole(model, plain).losses, rel=1e-4)
    outcome = split_model(model, HALVES, batches)
    assert outcome.verdict == "exact", outcome


def test_stages_with_caches_of_their_own_write_as_the_whole(model_type):
    model = tiny_model(model_type)
    if can_use_cache(model, Topology()):
        assert bool(find_generation_problem(model)) == (model_type in RECOMPUTES)


@pytest.mark.parametrize("kind", ["blt", "gemma4_text", "zamba2", "zaya"])
def test_without_poison_it_would_train_wrongly_and_say_nothing(kind, monkeypatch):
    assert split_type(kind, 2).travels != "hidden states"
    # Everything that stands for what did not travel is made with it.
    monkeypatch.setattr(torch, "nan", 0.0)
    assert Absent((1,), torch.float32).poison(CPU) == 0
    outcome = split_type(kind, 2)
    assert outcome.travels == "hidden states"
    assert outcome.verdict == "wrong"
    assert outcome.gradient_difference > 1e-2
