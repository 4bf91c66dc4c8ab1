"""FSDP2 within a pipeline: a step of tiny models of several types beside the whole model, and what a rank sends."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import hfdist
from benchmarks.growth import training
from hfdist.errors import ConfigError
from hfdist.strategies.base import TrainerHooks
from hfdist.strategies.fsdp import ShardedEngine
from hfdist.strategies.pipeline_fsdp import PipelineFsdpEngine
from hfdist.testing import RankFailed, run_ranks
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.splitting import compare_gradients, compare_losses, run_whole

pytestmark = pytest.mark.distributed

NUM_RANKS, NUM_MICROBATCHES = 4, 4
ITEM_BYTES = 4
BOUND = 2e-6


@dataclass(frozen=True)
class Case:
    """A model, and how it is split and sharded."""

    model_type: str
    schedule: str = "1f1b"
    layout: dict = field(default_factory=dict)
    frozen: tuple = ()
    checkpointing: bool = False


CASES = {
    "untied, 1f1b": Case("llama"),
    "tied, in a V": Case("gpt2", "zbv"),
    "tied, over and over": Case("qwen3", "interleaved_1f1b"),
    "backwards in halves, experts": Case("mixtral", "interleaved_zero_bubble"),
    "replicas of whole stages": Case("qwen3", "dualpipev", {"replicate": 2}),
    "the embedding on every stage": Case("gemma3n_text"),
    "uneven stages, recomputed": Case("llama", "gpipe", {"blocks_per_stage": [5, 1]}, checkpointing=True),
    "a rank with nothing to train": Case("llama", frozen=("embed_tokens", *(f"layers.{i}." for i in range(3)))),
    "the pipeline alone": Case("llama", layout={"pipeline": 4}),
}


def run_case(case):
    """Two steps with an evaluation behind each; the largest relative differences on this rank."""
    torch.set_num_threads(1)
    layout = {"pipeline": 2, "schedule": case.schedule} | case.layout
    num_ranks = dist.get_world_size()
    data_size = num_ranks // layout["pipeline"]
    sizes = {"global_batch_size": NUM_MICROBATCHES * data_size, "micro_batch_size": 1}
    strategy = hfdist.make_strategy(sharding="fsdp2", **sizes, **layout)
    model = tiny_model(case.model_type)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    reference = copy.deepcopy(model)
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    engine = strategy.build(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained or [torch.zeros(1)], lr=0.0)
    engine.setup(model, SimpleNamespace(optimizer=optimizer), None)
    hooks = TrainerHooks(model=model, training_step=None, loss=lambda model, part, _: model(**part).loss * num_ranks)
    differences, rank = [], strategy.topology.data_rank
    own = slice(rank * NUM_MICROBATCHES, (rank + 1) * NUM_MICROBATCHES)
    for step in range(2):
        batches = make_batches(reference, data_size, step)
        whole = run_whole(reference, [batch for of_rank in batches for batch in of_rank])
        batch = join(batches[rank])
        differences += compare_step(engine, hooks, batch, whole)
        optimizer.zero_grad()
        values = engine.forward(batch, lambda model, part: model(**part).loss.item(), hooks)
        differences += [compare_losses(values, whole.losses[own])] if values else []
        check_sharded(engine)
    return float(max(differences))


def make_batches(model, data_size, step):
    """The micro batches of each data rank. In the second step only the first data rank has seen their shape."""
    return [
        [
            tiny_batch(model, 1, 16 + 8 * step * data_rank, seed=data_rank * NUM_MICROBATCHES + number)
            for number in range(NUM_MICROBATCHES)
        ]
        for data_rank in range(data_size)
    ]


def join(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def compare_step(engine, hooks, batch, whole):
    loss = engine.forward_backward(batch, None, hooks)
    dist.all_reduce(loss)
    gradients = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in engine.model.named_parameters()
    }
    norm = torch.nn.utils.get_total_norm({id(g): g for g in whole.gradients.values() if g is not None}.values())
    ours = [loss / dist.get_world_size(), engine.clip_grad_norm(0.0, None)]
    return [compare_losses(ours, [sum(whole.losses), norm]), compare_gradients(gradients, whole.gradients)[0]]


def check_sharded(engine):
    """Nothing that was gathered may be left, in sight or in memory."""
    assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    gathered = [parameter for module in engine._pipeline.modules.values() for parameter in module.parameters()]
    assert sum(parameter.untyped_storage().nbytes() for parameter in gathered) == 0


def run_cases(cases):
    return {name: run_case(case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(run_cases, NUM_RANKS, CASES, timeout_seconds=300)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_the_whole_model(outcomes, name):
    assert max(of_rank[name] for of_rank in outcomes) < BOUND


def counted_twice(engine):
    REDUCE(engine)
    engine._sum_shared()


REDUCE = PipelineFsdpEngine._reduce_gradients
TIED = {"tied": Case("gpt2")}


def test_gradients_that_are_added_up_twice_show(monkeypatch):
    monkeypatch.setattr(PipelineFsdpEngine, "_reduce_gradients", counted_twice)
    assert max(of_rank["tied"] for of_rank in run_ranks(run_cases, NUM_RANKS, TIED)) > 0.1


def test_what_an_evaluation_leaves_gathered_shows(monkeypatch):
    monkeypatch.setattr(ShardedEngine, "_reshard", lambda *_: None)
    with pytest.raises(RankFailed, match="check_sharded"):
        run_ranks(run_cases, NUM_RANKS, TIED)


SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
         "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("num_sequences", [4, 8])
def test_weights_are_gathered_and_gradients_reduced_once_a_step(num_sequences):
    layout, num_shards = {"sharding": "fsdp2", "pipeline": 2}, 2
    work = training.Work(layout=layout, sizes=SIZES, global_batch_size=num_sequences, sequence_tokens=16, num_steps=1)
    of_ranks = run_ranks(training.train, NUM_RANKS, work)
    whole = sum(parameter.numel() for parameter in LlamaForCausalLM(LlamaConfig(**SIZES)).parameters()) * ITEM_BYTES
    assert sum(costs.weight_bytes for costs in of_ranks) == pytest.approx(whole, rel=0.01)
    for costs in of_ranks:
        # Of this rank's stage, whose weights are on so many ranks.
        expected = (num_shards - 1) / num_shards * costs.weight_bytes * num_shards
        sent = {kind: costs.ring_bytes[kind] for kind in ("allgather", "reduce_scatter")}
        assert sent == pytest.approx(dict.fromkeys(sent, expected), rel=0.03)
        assert costs.optimizer_bytes == pytest.approx(2 * costs.weight_bytes, rel=0.01)


def refused(layout):
    model = tiny_model("llama")
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError) as caught:
        hfdist.make_strategy(sharding="fsdp2", pipeline=2, global_batch_size=8, **layout).build(model)
    return caught.value.where


def test_what_cannot_be_sharded_is_refused_on_all_ranks():
    assert run_ranks(refused, NUM_RANKS, {}) == ["scale"] * NUM_RANKS
    assert run_ranks(refused, NUM_RANKS, {"prefetch": 1}) == ["strategy.prefetch"] * NUM_RANKS
