"""Eight things that end or bias a run under other pipelines, and must come out here as in one process."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import hfdist
from hfdist.errors import ConfigError, PartitionError
from hfdist.config.pipeline import Schedule
from hfdist.models.blocks import find_block_parts, find_blocks
from hfdist.models.initialize import initialize_by_name
from hfdist.pipeline.cut import cut_model
from hfdist.pipeline.link import Link
from hfdist.pipeline.parcel import CARRIES
from hfdist.pipeline.pipeline import Pipeline
from hfdist.pipeline.schedule import rank_of_stage
from hfdist.pipeline.timeline import Recorder
from hfdist.testing import run_ranks
from tests.unit.pipeline import toys
from tests.unit.pipeline.toys import make_toy, toy_batch

pytestmark = pytest.mark.distributed

BOUND = 1e-5
VOCABULARY = 32
SCHEDULES = ("1f1b", "interleaved_zero_bubble", "zbv")


def make_llama(**config):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "tie_word_embeddings": False} | config
    model = LlamaForCausalLM(LlamaConfig(**sizes | config))
    initialize_by_name(model, seed=0)
    return model.train()


def make_compiled():
    model = make_llama()
    for block in find_blocks(model):
        # The default backend takes minutes on a CPU; what a pipeline meets is a fused backward, which this has too.
        block.compile(backend="aot_eager")
    return model


class ReturnsTuple(toys.Toy):
    """As transformers' models do with `return_dict=False`."""

    def answer(self, loss, logits):
        return logits if loss is None else (loss, logits)


# ---- batches of a step: 8 sequences, in 4 micro batches ----


def plain(tokens=6, seed=0):
    return toy_batch(8, tokens, seed=seed)


def padded(mask_type):
    """Rows of different lengths, filled up on the right."""
    batch = plain(9)
    mask = torch.arange(9) < torch.tensor([9, 2, 5, 7, 3, 9, 4, 6])[:, None]
    return {**batch, "labels": batch["labels"].masked_fill(~mask, -100), "attention_mask": mask.to(mask_type)}


def packed():
    """Two documents in each row, told apart by their positions alone."""
    lengths = torch.tensor([3, 5, 4, 2, 6, 7, 1, 4])[:, None]
    positions = torch.arange(9).expand(8, 9)
    return {**plain(9), "position_ids": torch.where(positions < lengths, positions, positions - lengths)}


def square_masked():
    """Every row has a mask of its own from each token to each, here of two blocks."""
    document = torch.arange(9) < torch.tensor([3, 5, 4, 2, 6, 7, 1, 4])[:, None]
    same = document[:, :, None] == document[:, None, :]
    return {**plain(9), "attention_mask": (same & torch.ones(9, 9).tril().bool())[:, None]}


def uneven():
    """From none to all tokens of a row are targets; one micro batch has none at all."""
    batch = plain(9)
    first = torch.tensor([9, 9, 0, 8, 5, 0, 7, 3])[:, None]
    return {**batch, "labels": batch["labels"].masked_fill(torch.arange(9) < first, -100)}


LENGTHS = [plain(6, 0), plain(9, 1), plain(4, 2), plain(6, 3)]
CASES = {
    "lengths": (make_toy, LENGTHS),
    "dict": (lambda: make_toy(toys.Dicts), [plain()]),
    "tuple": (lambda: make_toy(ReturnsTuple), [plain()]),
    "blocks that return tuples": (lambda: make_toy(toys.Tuples), [plain()]),
    "model output": (make_llama, [plain()]),
    "padding": (make_llama, [padded(torch.bool), padded(torch.int64)]),
    "packing": (make_llama, [packed()]),
    "square masks": (make_llama, [square_masked()]),
    "compiled": (make_compiled, [plain(), plain(9, 1)]),
    "tied": (lambda: make_llama(tie_word_embeddings=True), [plain(), plain(9, 1)]),
    "tied toy": (lambda: make_toy(tie_word_embeddings=True), [plain()]),
    "tokens": (make_llama, [uneven()]),
    "second output": (lambda: make_toy(toys.SecondOutput), [plain()]),
    "u-net": (lambda: make_toy(toys.UNet), [plain(), plain(9)]),
    "embedding": (lambda: make_toy(toys.EmbedsAgain), [plain()]),
    "tied embedding": (lambda: make_toy(toys.EmbedsAgain, tie_word_embeddings=True), [plain()]),
    "input": (lambda: make_toy(toys.KeepsInput), [plain()]),
    "between": (lambda: make_toy(toys.LearnsBetween), [plain()]),
    "caches": (lambda: make_toy(toys.Remembers), LENGTHS[:2]),
    "skipped": (lambda: make_toy(toys.Skips), [plain()]),
    "in place": (lambda: make_toy(toys.WritesInPlace), [plain()]),
}
REFUSED = (toys.Twice, toys.Backwards, toys.Reversible, toys.Detaches, toys.Stops, toys.SideChannel)
DEEP = {
    "tied": (lambda: make_llama(tie_word_embeddings=True, num_hidden_layers=8), [plain(), plain(9, 1)]),
    "u-net": (lambda: make_toy(toys.UNet, num_hidden_layers=8), [plain()]),
}


def num_targets(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def loss_of(model, batch, num_items):
    outputs = model(**batch, num_items_in_batch=num_items)
    return outputs[0] if isinstance(outputs, tuple) else outputs["loss"]


def compare(engine_model, whole, loss, norm, expected_loss):
    """Largest relative differences; gradients by name, of this rank's parameters."""
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    expected_norm = torch.nn.utils.get_total_norm(gradients.values())
    own = {name: p.grad for name, p in engine_model.named_parameters() if p.grad is not None}
    assert set(own) <= set(gradients)
    return {
        "loss": (abs(loss - expected_loss) / expected_loss).item(),
        "norm": (abs(norm - expected_norm) / expected_norm).item(),
        "gradients": {n: ((g - gradients[n]).abs().max() / gradients[n].abs().max()).item() for n, g in own.items()},
        "names": sorted(gradients),
    }


def make_strategy(**layout):
    return hfdist.make_strategy(global_batch_size=8, micro_batch_size=2, sequence_length=8, **layout)


def step_as_engine(case, **layout):
    """Run the case's steps through an engine, and beside it in one piece."""
    make, batches = case
    engine = make_strategy(**layout).build(make())
    engine.attach(engine.model, None, None)
    world_size = dist.get_world_size()
    default = SimpleNamespace(loss=lambda *arguments: loss_of(*arguments) * world_size)
    whole = make()
    losses, expected = [], []
    for batch in batches:
        losses.append(engine.forward_backward(batch, num_targets(batch), default))
        expected.append(loss_of(whole, batch, num_targets(batch)))
    sum(expected).backward()
    norm = engine.clip_grad_norm(0.0, None)
    return compare(engine.model, whole, torch.stack(losses).sum(), norm, sum(expected).detach())


def step_of_uneven_micro_batches(schedule):
    """Micro batches of one step that differ in length and in number of rows, through the pipeline itself."""
    microbatches = [toy_batch(2, 6), toy_batch(1, 9), toy_batch(3, 4), toy_batch(2, 6, seed=1)]
    model, whole, device = make_toy(), make_toy(), torch.device("cpu")
    ranks = rank_of_stage(schedule, 2, 2)
    mine = [stage for stage, rank in enumerate(ranks) if rank == dist.get_rank()]
    cut = cut_model(model, find_block_parts(model), tuple(range(i, i + 1) for i in range(4)), mine)
    pipeline = Pipeline(
        {stage: cut.view(stage, CARRIES[0]) for stage in mine},
        schedule,
        Link(ranks, dist.group.WORLD, device),
        num_microbatches=len(microbatches),
        recorder=Recorder(rank=dist.get_rank(), device=device),
        splits_backward=True,
    )
    losses = pipeline.forward_backward(microbatches, lambda stage, batch: stage(**batch).loss)
    total = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(total)
    squared = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    dist.all_reduce(squared)
    expected = sum(whole(**batch).loss for batch in microbatches)
    expected.backward()
    return compare(model, whole, total.detach(), squared.sqrt(), expected.detach())


def refusal(kind):
    with pytest.raises(PartitionError) as caught:
        make_strategy(pipeline=2).build(make_toy(kind))
    return str(caught.value)


def all_of_two_ranks():
    """One fork for everything on two ranks."""
    results = {
        (schedule, name): step_as_engine(case, pipeline=2, schedule=schedule)
        for schedule, (name, case) in product(SCHEDULES, CASES.items())
    }
    for schedule in (Schedule.interleaved_1f1b, Schedule.interleaved_zero_bubble, Schedule.zbv):
        results[schedule.value, "uneven micro batches"] = step_of_uneven_micro_batches(schedule)
    return results, [refusal(kind) for kind in REFUSED]


def all_of_four_ranks():
    return {
        (schedule, name): step_as_engine(case, pipeline=4, schedule=schedule)
        for schedule, (name, case) in product(("1f1b", "zbv"), DEEP.items())
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(all_of_two_ranks, 2)


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(all_of_four_ranks, 4)


def assert_same(of_ranks, bound=BOUND):
    for result in of_ranks:
        assert result["loss"] < bound
        assert result["norm"] < bound
        assert max(result["gradients"].values()) < bound, result["gradients"]
    # No gradient is left out.
    assert sorted(set().union(*(result["gradients"] for result in of_ranks))) == of_ranks[0]["names"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_same_loss_and_gradients_on_two_ranks(two_ranks, schedule, name):
    assert_same([results[schedule, name] for results, _ in two_ranks])
