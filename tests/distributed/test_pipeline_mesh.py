"""A pipeline with FSDP2, tensor and context parallelism: a step of tiny models of several types beside the whole."""

import copy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hfdist
from hfdist.checkpoint.piece import WEIGHT
from hfdist.collectives import gather_json
from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError
from hfdist.pipeline.stage import Stage
from hfdist.strategies.engine import TrainerHooks
from hfdist.strategies.fsdp import ShardedEngine
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.pipelines.fsdp import PipelineFsdpEngine
from hfdist.strategies.pipelines.pipeline import PipelineEngine
from hfdist.testing import RankFailed, run_ranks
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.sharding import packed
from tests.zoo.splitting import compare_gradients, compare_losses, run_whole

# Many cases in one test.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

NUM_RANKS, NUM_MICROBATCHES = 4, 4
BOUND = 1e-5
FSDP = {"sharding": "fsdp2"}
HSDP = FSDP | {"replicate": 2}
TENSOR, CONTEXT, EXPERT = {"tensor": 2}, {"context": 2}, {"expert": 2}
GATHER = CONTEXT | {"context_method": "gather"}
SEQUENCE = TENSOR | {"sequence": True}


@dataclass(frozen=True)
class Case:
    """A model, and how it is split and sharded."""

    model_type: str
    schedule: str = "1f1b"
    layout: dict = field(default_factory=lambda: FSDP)
    num_ranks: int = NUM_RANKS
    fields: dict = field(default_factory=dict)
    frozen: tuple = ()
    checkpointing: bool = False


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# Trained by the Trainer: pipelines with FSDP2 and with tensor ranks in test_layouts.py and test_tensor.py.
CASES = {
    "backwards in halves, experts, recomputed": Case(
        "mixtral", "interleaved_zero_bubble", FSDP | EXPERT, checkpointing=True
    ),
    "context by gathering, recomputed": Case("llama", layout=GATHER, fields=TIED, checkpointing=True),
    "a rank with nothing to train": Case("llama", frozen=("embed_tokens", *(f"layers.{i}." for i in range(3)))),
}
MORE_CASES = {
    "tokens of tensor ranks, tied, in a V": Case("llama", "zbv", SEQUENCE, fields=TIED),
    "4d": Case("qwen3_moe", layout=FSDP | TENSOR | EXPERT, num_ranks=8, checkpointing=True),
    "backwards in halves, whole experts": Case("mixtral", "interleaved_zero_bubble"),
    "tied, in a V": Case("gpt2", "zbv"),
    "replicas of whole stages": Case("qwen3", "dualpipev", HSDP),
    "replicas of whole stages, tied": Case("gpt2", "dualpipev", HSDP),
    "uneven stages, recomputed": Case("llama", "gpipe", FSDP | {"blocks_per_stage": [5, 1]}, checkpointing=True),
    "tensor, tied, in a V": Case("llama", "zbv", TENSOR, fields=TIED),
    "context, windows": Case("gemma3_text", "dualpipev", CONTEXT),
    "4d with context, in a V, recomputed": Case(
        "qwen3", "zbv", FSDP | TENSOR | GATHER, num_ranks=8, fields=UNTIED, checkpointing=True
    ),
    "tied, over and over": Case("qwen3", "interleaved_1f1b"),
    "the embedding on every stage": Case("gemma3n_text"),
    "the pipeline alone": Case("llama", layout=FSDP | {"pipeline": 4}),
    "tensor, untied, over and over": Case("qwen3", "interleaved_1f1b", TENSOR, fields=UNTIED),
    "3d, experts": Case("mixtral", "interleaved_zero_bubble", FSDP | TENSOR, num_ranks=8),
    "experts, in a V": Case("mixtral", "zbv", EXPERT),
    "experts, shared ones, over and over": Case("deepseek_v3", "interleaved_1f1b", FSDP | EXPERT, num_ranks=8),
    "tokens of tensor ranks, uneven, recomputed": Case(
        "qwen3", "gpipe", SEQUENCE | {"blocks_per_stage": [5, 1]}, checkpointing=True
    ),
    "tokens of tensor ranks, recomputed": Case("llama", layout=SEQUENCE, fields=UNTIED, checkpointing=True),
    "tokens of tensor ranks, over and over": Case("qwen3", "interleaved_1f1b", SEQUENCE),
    "tokens of tensor ranks, backwards in halves": Case("llama", "interleaved_zero_bubble", SEQUENCE),
    "tokens of tensor ranks, in a V of two": Case("llama", "dualpipev", SEQUENCE, fields=TIED),
    "3d, tokens of tensor ranks": Case("llama", "zbv", FSDP | SEQUENCE, num_ranks=8, checkpointing=True),
    "hsdp and context, uneven": Case("llama", "gpipe", HSDP | CONTEXT | {"blocks_per_stage": [4, 2]}, num_ranks=8),
}
"""For `make mesh`."""


def run_case(case):
    """Two steps with an evaluation after each; the largest relative differences on this rank."""
    torch.set_num_threads(1)
    layout = {"pipeline": 2, "schedule": case.schedule} | case.layout
    num_tensor, num_context = layout.get("tensor", 1), layout.get("context", 1)
    data_size = case.num_ranks // layout["pipeline"] // num_tensor // num_context
    sizes = {"global_batch_size": NUM_MICROBATCHES * data_size, "micro_batch_size": 1}
    strategy = hfdist.make_strategy(**sizes, **layout)
    model = tiny_model(case.model_type, **case.fields)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    reference = copy.deepcopy(model)
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    engine = strategy.build(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained or [torch.zeros(1)], lr=0.0)
    engine.setup(model, SimpleNamespace(optimizer=optimizer), None)
    differences, rank = [], strategy.topology.data_rank
    own = slice(rank * NUM_MICROBATCHES, (rank + 1) * NUM_MICROBATCHES)
    for step in range(2):
        batches = make_batches(reference, data_size, step)
        num_items = sum((batch["labels"][:, 1:] != IGNORED).sum() for of_rank in batches for batch in of_rank)
        loss = partial(loss_of, num_items=num_items, num_losses=case.num_ranks // num_tensor)
        hooks = TrainerHooks(model=model, loss=lambda *args, loss=loss: loss(*args[:2]))
        loss_alone = partial(loss_of, num_items=num_items)
        whole = run_whole(reference, [batch for of_rank in batches for batch in of_rank], loss_alone)
        batch = join(batches[rank])
        differences += compare_step(engine, hooks, batch, reference, whole)
        optimizer.zero_grad()
        values = engine.forward(batch, lambda model, part, loss=loss_alone: loss(model, part).item(), hooks)
        check_given_once(values, data_size * num_context)
        values = add_up_shares(values, engine, strategy)
        differences += [compare_losses(values, whole.losses[own])] if values else []
        check_sharded(engine)
    return float(max(differences))


def loss_of(model, batch, num_items, num_losses=1):
    return model(**batch, num_items_in_batch=num_items).loss * num_losses


def make_batches(model, data_size, step):
    """The micro batches of each data rank. In the second step only the first data rank has seen their shape."""
    return [
        [
            packed(tiny_batch(model, 1, 16 + 8 * step * data_rank, seed=data_rank * NUM_MICROBATCHES + number))
            for number in range(NUM_MICROBATCHES)
        ]
        for data_rank in range(data_size)
    ]


def join(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def check_given_once(values, num_shares):
    """One rank of each model replica, or several with other tokens, must give losses: an evaluation adds them up."""
    assert sum(gather_json(len(values))) == NUM_MICROBATCHES * num_shares


def add_up_shares(values, engine, strategy):
    """Ranks that share sequences have a share of each loss."""
    if engine.context is None or not values:
        return values
    total = torch.tensor(values)
    dist.all_reduce(total, group=strategy.mesh.get_group("context"))
    return total.tolist()


def compare_step(engine, hooks, batch, reference, whole):
    loss = engine.forward_backward(batch, None, hooks)
    dist.all_reduce(loss)
    norm = torch.nn.utils.get_total_norm({id(g): g for g in whole.gradients.values() if g is not None}.values())
    ours = [loss / dist.get_world_size(), engine.clip_grad_norm(0.0)]
    names = set().union(*gather_json(sorted(piece.name for piece in engine.pieces())))
    assert names >= {name for name, _ in reference.named_parameters()}
    return [compare_losses(ours, [sum(whole.losses), norm]), compare_pieces(engine, whole.gradients)]


def compare_pieces(engine, expected):
    """What this rank holds of each gradient, put where the weights are, whose pieces the engine knows."""
    parameters = dict(engine.model.named_parameters())
    unused = {name for name, parameter in parameters.items() if parameter.grad is None}
    with torch.no_grad():
        kept = [local_tensor(parameter).clone() for parameter in parameters.values()]
        for parameter in parameters.values():
            if parameter.grad is not None:
                local_tensor(parameter).copy_(local_tensor(parameter.grad))
        # Differences count in proportion to the whole model's, of a rank that trains nothing, too.
        largest = max((gradient for gradient in expected.values() if gradient is not None), key=torch.norm)
        ours, theirs = {"": largest}, {"": largest}
        for number, piece in enumerate(piece for piece in engine.pieces() if piece.name in parameters):
            if piece.key == WEIGHT and piece.view.numel() > 0:
                name, reference = f"{piece.name} {number}", expected[piece.name]
                ours[name] = None if piece.name in unused else piece.view.clone()
                theirs[name] = None if reference is None else piece.of_whole(reference)
        for parameter, value in zip(parameters.values(), kept, strict=True):
            local_tensor(parameter).copy_(value)
    return compare_gradients(ours, theirs)[0]


def check_sharded(engine):
    """Nothing that was gathered may be left, in sight or in memory."""
    if not isinstance(engine, ShardedEngine):
        return
    assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    gathered = [parameter for module in engine._pipeline.modules.values() for parameter in module.parameters()]
    assert sum(parameter.untyped_storage().nbytes() for parameter in gathered) == 0


def run_cases(cases):
    return {name: run_case(case) for name, case in cases.items()}


def check_cases(cases):
    """All cases of a size in one process group."""
    for size in sorted({case.num_ranks for case in cases.values()}):
        own = {name: case for name, case in cases.items() if case.num_ranks == size}
        of_ranks = run_ranks(run_cases, size, own, timeout_seconds=800)
        worst = {name: max(of_rank[name] for of_rank in of_ranks) for name in own}
        assert max(worst.values()) < BOUND, worst


def test_a_step_is_that_of_the_whole_model():
    check_cases(CASES)


@pytest.mark.many
def test_more_steps_are_those_of_the_whole_model():
    check_cases(MORE_CASES)


def counted_twice(engine):
    REDUCE(engine)
    engine._sum_shared()


REDUCE = PipelineFsdpEngine._reduce_gradients
SHARED = {"tied": Case("gpt2")}


@pytest.mark.many
def test_gradients_that_are_added_up_twice_show(monkeypatch):
    monkeypatch.setattr(PipelineFsdpEngine, "_reduce_gradients", counted_twice)
    assert max(of_rank["tied"] for of_rank in run_ranks(run_cases, NUM_RANKS, SHARED)) > 0.1


@pytest.mark.many
def test_what_an_evaluation_leaves_gathered_shows(monkeypatch):
    monkeypatch.setattr(ShardedEngine, "_reshard", lambda *_: None)
    with pytest.raises(RankFailed, match="check_sharded"):
        run_ranks(run_cases, NUM_RANKS, SHARED)


def sum_of_partial_gradients_forgotten():
    PipelineEngine._sum_shared = lambda engine: None


def tensor_ranks_counted_into_the_loss():
    begin = PipelineEngine.__init__

    def counting_all(engine, strategy, *found, **axes):
        begin(engine, strategy, *found, **axes)
        engine._num_losses = strategy.topology.world_size

    PipelineEngine.__init__ = counting_all


def whole_parameters_counted_on_each_tensor_rank():
    PipelineEngine._counts = lambda engine, name: name not in engine._io.counted_elsewhere


def blocks_without_their_sequence():
    def backward(stage, microbatch, output_gradients):
        return stage._graphs.pop(microbatch).backward(output_gradients)

    Stage.backward = backward


def run_spoilt(spoil, name):
    spoil()
    return run_case((CASES | MORE_CASES)[name])


@pytest.mark.many
@pytest.mark.parametrize(
    "spoil",
    [
        sum_of_partial_gradients_forgotten,
        tensor_ranks_counted_into_the_loss,
        whole_parameters_counted_on_each_tensor_rank,
    ],
)
def test_a_mistake_shows(spoil):
    # Whole on each tensor rank are norms alone, a small part of the norm of all gradients.
    assert max(run_ranks(run_spoilt, NUM_RANKS, spoil, "tensor, untied, over and over")) > 1e-4


@pytest.mark.many
def test_blocks_that_are_computed_again_need_their_sequence():
    with pytest.raises(RankFailed, match="size of tensor"):
        run_ranks(run_spoilt, NUM_RANKS, blocks_without_their_sequence, "context by gathering, recomputed")


REFUSED = [
    ("llama", FSDP, "scale", "shape []"),
    ("llama", FSDP | {"prefetch": 1}, "make_strategy(prefetch)", "1"),
    # Of the model that is split, a small one is tried.
    ("bloom", CONTEXT, "strategy.context", "differs by"),
]


def refused():
    found = []
    for model_type, layout, *_ in REFUSED:
        model = tiny_model(model_type)
        if layout.get("sharding") == "fsdp2":
            model.scale = torch.nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ConfigError) as caught:
            hfdist.make_strategy(pipeline=2, global_batch_size=8, **layout).build(model)
        found.append((caught.value.where, str(caught.value.found)))
    return found


def test_what_would_be_wrong_is_refused_on_all_ranks():
    for of_rank in run_ranks(refused, NUM_RANKS):
        for (place, value), (*_, where, found) in zip(of_rank, REFUSED, strict=True):
            assert place == where
            assert found in value
