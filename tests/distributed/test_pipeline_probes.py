"""What ends or biases a run under other pipelines must come out here as in one process.

Through the Trainer it does so in test_pipeline_trainer.py, test_losses.py and, with data ranks, in test_router_loss.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hfdist
from hfdist.config.strategy import Schedule
from hfdist.errors import ConfigError, PartitionError
from hfdist.models.blocks import find_block_parts
from hfdist.models.initialize import initialize_by_name
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.pipeline import Pipeline
from hfdist.pipeline.schedule import rank_of_stage
from hfdist.pipeline.split import split_at_blocks
from hfdist.pipeline.timeline import Recorder
from hfdist.strategies.engine import TrainerHooks
from hfdist.testing import run_ranks
from tests.marks import many
from tests.unit.pipeline import toys
from tests.unit.pipeline.staging import loss_of
from tests.unit.pipeline.toys import HIDDEN, QUARTERS, REFUSED, make_toy, toy_batch

pytestmark = pytest.mark.distributed

BOUND = 1e-5


def make_llama(**config):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    defaults = {"num_hidden_layers": 4, "vocab_size": 32, "tie_word_embeddings": False, "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes | defaults | config))
    initialize_by_name(model, seed=0)
    return model.train()


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
    "tuple": (lambda: make_toy(toys.ReturnsTuple), [plain()]),
    "no known embedding": (lambda: make_toy(toys.Unnamed), [plain()]),
    "blocks that return tuples": (lambda: make_toy(toys.Tuples), [plain()]),
    "model output": (make_llama, [plain()]),
    "padding": (make_llama, [padded(torch.bool), padded(torch.int64)]),
    "packing": (make_llama, [packed()]),
    "square masks": (make_llama, [square_masked()]),
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
    "two lists": (lambda: make_toy(toys.TwoLists), [plain()]),
    "a cache": (lambda: make_llama(use_cache=True), [plain()]),
}
# What is summed over ranks, or travels past a stage, in each kind of schedule; the other cases in one of two by turns.
RISKY = ("lengths", "tied", "between", "tied embedding", "skipped")
PAIRS = [
    *product(("1f1b", "zbv"), RISKY),
    *product(("interleaved_zero_bubble",), RISKY[2:4]),
    *((("1f1b", "zbv")[number % 2], case) for number, case in enumerate(case for case in CASES if case not in RISKY)),
]
MORE_PAIRS = [*product(("interleaved_zero_bubble",), RISKY[:2] + RISKY[4:])]
UNEVEN = (Schedule.interleaved_1f1b, Schedule.interleaved_zero_bubble, Schedule.zbv, Schedule.dualpipev)
DEEP = {
    "zbv": (lambda: make_llama(tie_word_embeddings=True, num_hidden_layers=8), [plain(), plain(9, 1)]),
    "1f1b": (lambda: make_toy(toys.UNet, num_hidden_layers=8), [plain()]),
}


def scaled_loss(model, batch, num_items):
    """As the Trainer gives it: a share of the loss of the step, times the number of processes."""
    return loss_of(model, batch | {"num_items_in_batch": num_items}) * dist.get_world_size()


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
    """Run the case's steps through an engine, and beside it in one piece; give what came of the last."""
    make, batches = case
    model, whole = make(), make()
    engine = make_strategy(**layout).build(model)
    optimizer = torch.optim.SGD(list(engine.model.parameters()) or [torch.zeros(1)], lr=0.0)
    engine.setup(engine.model, SimpleNamespace(optimizer=optimizer), None)
    hooks = TrainerHooks(model=engine.model, loss=scaled_loss)
    for batch in batches:
        model.zero_grad()
        whole.zero_grad()
        num_items = (batch["labels"][:, 1:] != -100).sum()
        loss = engine.forward_backward(batch, num_items, hooks)
        expected = loss_of(whole, batch | {"num_items_in_batch": num_items})
        expected.backward()
    return compare(model, whole, loss, engine.clip_grad_norm(0.0), expected.detach())


def step_of_uneven_micro_batches(schedule):
    """Micro batches of one step that differ in length and in number of rows, through the pipeline itself."""
    microbatches = [toy_batch(2, 6), toy_batch(1, 9), toy_batch(3, 4), toy_batch(2, 6, seed=1)]
    model, whole, device = make_toy(), make_toy(), torch.device("cpu")
    ranks = rank_of_stage(schedule, 2, 2)
    mine = [stage for stage, rank in enumerate(ranks) if rank == dist.get_rank()]
    cut = split_at_blocks(model, find_block_parts(model), QUARTERS, mine)
    pipeline = Pipeline(
        {stage: cut.stage_module(stage, HIDDEN) for stage in mine},
        schedule,
        P2PChannel(ranks, dist.group.WORLD, device),
        num_microbatches=len(microbatches),
        recorder=Recorder(rank=dist.get_rank(), device=device),
        splits_backward=True,
        expert_group=dist.group.WORLD,
    )
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        losses = pipeline.forward_backward(
            list(map(nullcontext, microbatches)), lambda model, batch: model(**batch).loss
        )
    # What shapes are new is asked once for all micro batches.
    assert reduced.call_count == 1
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


def all_of_two_ranks(pairs):
    """One fork for everything on two ranks."""
    results = {(schedule, name): step_as_engine(CASES[name], pipeline=2, schedule=schedule) for schedule, name in pairs}
    for schedule in UNEVEN:
        results[schedule.value, "uneven"] = step_of_uneven_micro_batches(schedule)
    return results, [refusal(kind) for kind in REFUSED]


def all_of_four_ranks():
    return {schedule: step_as_engine(case, pipeline=4, schedule=schedule) for schedule, case in DEEP.items()}


@pytest.fixture(scope="module")
def two_ranks(request):
    """Of the pairs that are asked for."""
    own = (item for item in request.session.items if item.path == request.path)
    calls = [call.params for item in own if (call := getattr(item, "callspec", None))]
    return run_ranks(all_of_two_ranks, 2, [(call["schedule"], call["name"]) for call in calls if "name" in call])


def assert_same(of_ranks):
    for result in of_ranks:
        assert result["loss"] < BOUND
        assert result["norm"] < BOUND
        assert max(result["gradients"].values()) < BOUND, result["gradients"]
    # Every gradient is on some rank.
    assert sorted(set().union(*(result["gradients"] for result in of_ranks))) == of_ranks[0]["names"]


@pytest.mark.parametrize(("schedule", "name"), [*PAIRS, *(many(*pair) for pair in MORE_PAIRS)])
def test_same_loss_and_gradients_on_two_ranks(two_ranks, schedule, name):
    assert_same([results[schedule, name] for results, _ in two_ranks])


def test_same_loss_and_gradients_on_four_ranks():
    results = run_ranks(all_of_four_ranks, 4)
    for schedule in DEEP:
        assert_same([result[schedule] for result in results])


@pytest.mark.parametrize("schedule", UNEVEN, ids=lambda schedule: schedule.value)
def test_micro_batches_of_one_step_may_differ_in_shape(two_ranks, schedule):
    assert_same([results[schedule.value, "uneven"] for results, _ in two_ranks])


def test_models_that_cannot_be_split_are_refused_on_all_ranks_alike(two_ranks):
    (_, first), (_, second) = two_ranks
    assert first == second
    for kind, message in zip(REFUSED, first, strict=True):
        assert f"{kind.__name__} cannot be split into pipeline stages at its blocks" in message
        assert "try:     strategy=ddp" in message


# ---- too few micro batches ----


@pytest.mark.parametrize(
    ("schedule", "sizes", "nearest"),
    [
        ("1f1b", {"global_batch_size": 6, "micro_batch_size": 2}, "global_batch_size=8, micro_batch_size=2"),
        ("dualpipev", {"global_batch_size": 4, "micro_batch_size": 1}, "global_batch_size=8"),
        ("interleaved_1f1b", {"global_batch_size": 9, "micro_batch_size": 1}, "global_batch_size=10"),
    ],
)
def test_too_few_micro_batches_are_refused_with_the_nearest_number_that_fits(monkeypatch, schedule, sizes, nearest):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError) as caught:
        hfdist.make_strategy(pipeline=4, schedule=schedule, **sizes)
    assert caught.value.where == "make_strategy(global_batch_size)"
    assert nearest in caught.value.hint


def test_any_number_of_micro_batches_where_the_schedule_can(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    for schedule in ("gpipe", "zbv"):
        assert hfdist.make_strategy(pipeline=4, schedule=schedule, global_batch_size=1).batch.num_microbatches == 1
