"""Completions of a model that trains are the same in every layout, and sharded weights are gathered once for them."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hfdist.config.strategy import Schedule, Sharding
from hfdist.models.initialize import initialize_by_name
from hfdist.models.partitioning import Partitioning
from hfdist.sent_bytes import ALL_GATHER, SentBytes
from hfdist.testing import run_ranks
from hfdist.trainer.generation import continuation
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampler, Sampling
from hfdist.trainer.step.forwards import evaluating
from tests.distributed.trainers import TINY, history, make_strategy, make_trainer
from tests.marks import many
from tests.zoo.models import tiny_config

pytestmark = pytest.mark.distributed

PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [4, 4]]
NUM_TOKENS = 12
# Weights so large that what is drawn depends on them.
LIVELY = TINY | {"initializer_range": 0.3}
LIMITS = GenerationLimits(max_new_tokens=NUM_TOKENS, end_ids=frozenset(range(60, 64)), most_tokens=None)
FIELDS = {
    "llama": LIVELY,
    "gpt2": LIVELY | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    # A window that ends within the prompts, and blocks for two stages on each of two ranks.
    "mistral": LIVELY | {"sliding_window": 6, "num_hidden_layers": 4},
    "mixtral": LIVELY | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_model(kind):
    # lfm2 has convolutions, whose states are kept; in gemma4_text blocks read the keys of others.
    config = tiny_config(kind, 4) if kind in ("lfm2", "gemma4_text") else AutoConfig.for_model(kind, **FIELDS[kind])
    model = AutoModelForCausalLM.from_config(config)
    initialize_by_name(model, 0, make_strategy(Sharding.zero3) if is_deepspeed_zero3_enabled() else Partitioning())
    return model


class Samples(TrainerCallback):
    """Samples before the first step, and after it."""

    def __init__(self):
        self.completions, self.likeliest, self.gathered_bytes = [], [], []

    def on_train_begin(self, args, state, control, **named):
        self._sample()

    def on_step_end(self, args, state, control, **named):
        self._sample()

    def _sample(self):
        topology = self.trainer.strategy.topology
        # Rows that differ from step to step.
        seeds = [100 * len(self.completions) + row for row in range(len(PROMPTS))]
        share = len(PROMPTS) // topology.data
        own = slice(topology.data_rank * share, (topology.data_rank + 1) * share)
        engine = self.trainer.engine
        how = {
            "topology": topology,
            "uses_cache": continuation.can_use_cache(self.trainer.model, topology),
        }
        with evaluating(self.trainer.training) as forward, SentBytes() as sent, engine.gathered():
            sampler = Sampler(limits=LIMITS, sampling=Sampling(temperature=2.0, top_k=30, top_p=0.98), **how)
            drawn = sampler.draw(PROMPTS[own], seeds[own], forward, rows_at_once=3)
            self.likeliest.append(continue_prompts(PROMPTS, forward, LIMITS, rows_at_once=3, **how))
        self.completions.append([one.tokens for one in drawn])
        gathered = Counter()
        for channel, count in sent.num_bytes.items():
            gathered[channel.kind] += count
        self.gathered_bytes.append(gathered[ALL_GATHER])


@dataclass
class Outcome:
    """Of one rank: of each time, and of each step."""

    completions: list
    likeliest: list
    gathered_bytes: list
    losses: list
    data_rank: int
    has_recomputed: bool


def train(folder, kind, sharding, layout, has_room=True):
    if not has_room:
        import hfdist.strategies.deepspeed.engine
        import hfdist.strategies.fsdp

        for module in (hfdist.strategies.deepspeed.engine, hfdist.strategies.fsdp):
            module.have_room = lambda *_: False
    samples, recompute, recomputed = Samples(), continuation._recompute_rows, []
    continuation._recompute_rows = lambda *arguments: recomputed.append(arguments) or recompute(*arguments)
    strategy = make_strategy(sharding, micro_batch_size=2, **layout)
    arguments = {"max_steps": 1, "learning_rate": 1e-3}
    trainer = make_trainer(folder, strategy, model=lambda: make_model(kind), arguments=arguments, callbacks=[])
    samples.trainer = trainer
    trainer.add_callback(samples)
    trainer.train()
    return Outcome(
        samples.completions,
        samples.likeliest,
        samples.gathered_bytes,
        history(trainer),
        data_rank=strategy.topology.data_rank,
        has_recomputed=bool(recomputed),
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """On one process, of the kinds that are asked for."""

    @cache
    def train_single(kind):
        return run_ranks(train, 1, tmp_path_factory.mktemp(kind), kind, Sharding.none, {}, group=False)[0]

    return train_single


def check(reference, ranks, *, recomputes=False):
    for rank in ranks:
        assert rank.losses == [pytest.approx(entry, rel=1e-4) for entry in reference.losses]
        assert rank.likeliest == reference.likeliest
        for of_step, whole in zip(rank.completions, reference.completions, strict=True):
            share = len(of_step)
            assert of_step == whole[rank.data_rank * share : (rank.data_rank + 1) * share]
        assert rank.has_recomputed is recomputes


@pytest.mark.parametrize("kind", [many(kind) if kind == "gpt2" else kind for kind in FIELDS])
def test_completions_end_at_different_lengths_and_change(reference, kind):
    outcome = reference(kind)
    assert len(outcome.completions) == 2
    assert len({len(row) for step in outcome.completions for row in step}) > 2
    assert all(row[-1] >= 60 or len(row) == NUM_TOKENS for step in outcome.completions for row in step)
    assert len({tuple(row) for row in outcome.likeliest[0]}) == len(PROMPTS)
    assert not outcome.has_recomputed


@pytest.mark.parametrize(
    ("sharding", "layout"),
    [
        many(Sharding.none, {}),
        many(Sharding.zero1, {}),
        many(Sharding.zero2, {}),
        (Sharding.none, {"tensor": 2}),
        many(Sharding.none, {"pipeline": 2}),
        (Sharding.none, {"context": 2}),
        many(Sharding.fsdp2, {"context": 2}),
    ],
    ids=str,
)
def test_every_layout_samples_the_same(tmp_path, reference, sharding, layout):
    ranks = run_ranks(train, 2, tmp_path, "llama", sharding, layout)
    check(reference("llama"), ranks, recomputes="context" in layout)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "sharding", "layout"),
    [
        many("gpt2", 2, Sharding.none, {"schedule": Schedule.gpipe}),
        ("mistral", 2, Sharding.none, {"schedule": Schedule.zbv}),
        many("mistral", 2, Sharding.none, {"schedule": Schedule.interleaved_1f1b}),
        many("lfm2", 2, Sharding.none, {}),
        many("mixtral", 4, Sharding.zero1, {}),
        many("mixtral", 4, Sharding.none, {"expert": 2}),
        many("llama", 4, Sharding.none, {"tensor": 2}),
        many("llama", 4, Sharding.fsdp2, {}),
    ],
    ids=str,
)
def test_stages_of_a_pipeline_have_caches_of_their_own(tmp_path, reference, kind, num_ranks, sharding, layout):
    check(reference(kind), run_ranks(train, num_ranks, tmp_path, kind, sharding, {"pipeline": 2} | layout))


@pytest.mark.many
def test_a_pipeline_without_such_caches_recomputes(tmp_path, reference):
    ranks = run_ranks(train, 2, tmp_path, "gemma4_text", Sharding.none, {"pipeline": 2})
    check(reference("gemma4_text"), ranks, recomputes=True)


def train_with_and_without_room(folder, sharding, layout):
    return [train(folder / str(has), "llama", sharding, layout, has) for has in (True, False)]


@pytest.mark.parametrize("sharding", [many(Sharding.fsdp2), Sharding.zero3])
def test_sharded_weights_are_gathered_once_where_there_is_room(tmp_path, reference, sharding):
    # So that DeepSpeed partitions matrices as small as these.
    small = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}
    layout = {"deepspeed": small} if sharding is Sharding.zero3 else {}
    ranks = run_ranks(train_with_and_without_room, 2, tmp_path, sharding, layout)
    sent_once = sum(parameter.nbytes for parameter in make_model("llama").parameters()) / 2
    for has_room, of_ranks in zip((True, False), zip(*ranks, strict=True), strict=True):
        check(reference("llama"), of_ranks)
        for num_bytes in (num_bytes for rank in of_ranks for num_bytes in rank.gathered_bytes):
            # Small ones that ZeRO-3 keeps whole need not travel.
            times = num_bytes / sent_once
            assert 0.9 < times < 1.1 if has_room else times > 3


def test_ranks_that_share_experts_wait_for_each_other(tmp_path, reference):
    check(reference("mixtral"), run_ranks(train, 2, tmp_path, "mixtral", Sharding.fsdp2, {"expert": 2}))
