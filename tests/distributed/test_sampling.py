"""Completions of a model that trains are the same in every layout, and sharded weights are gathered once for them."""

from collections import Counter

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hfdist.config.strategy import Sharding
from hfdist.models.build import initialize_by_name
from hfdist.models.partitioning import Partitioning
from hfdist.sent_bytes import ALL_GATHER, SentBytes
from hfdist.testing import run_ranks
from hfdist.trainer.evaluation.loop import Evaluator
from hfdist.trainer.generation.limits import Limits
from hfdist.trainer.generation.sampling import Sampling, sample_completions
from tests.distributed.trainers import TINY, history, make_strategy, make_trainer

pytestmark = pytest.mark.distributed

PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [4, 4]]
NUM_TOKENS = 12
# Weights so large that what is drawn depends on them.
LIVELY = TINY | {"initializer_range": 0.3}
EXPERTS = LIVELY | {"num_local_experts": 4, "num_experts_per_tok": 2}


def make_model(kind):
    config = AutoConfig.for_model(kind, **EXPERTS if kind == "mixtral" else LIVELY)
    model = AutoModelForCausalLM.from_config(config)
    initialize_by_name(model, 0, make_strategy(Sharding.zero3) if is_deepspeed_zero3_enabled() else Partitioning())
    return model


class Samples(TrainerCallback):
    """Samples before the first step, and behind each."""

    def __init__(self):
        self.completions, self.gathered_bytes = [], []

    def on_train_begin(self, args, state, control, **named):
        self._sample()

    def on_step_end(self, args, state, control, **named):
        self._sample()

    def _sample(self):
        topology = self.trainer.strategy.topology
        # Rows that differ from step to step.
        seeds = [100 * len(self.completions) + row for row in range(len(PROMPTS))]
        share = len(PROMPTS) // topology.data_size
        own = slice(topology.data_rank * share, (topology.data_rank + 1) * share)
        evaluator, engine = Evaluator(self.trainer), self.trainer.engine
        with evaluator.forwards() as forward, SentBytes() as sent, engine.gathered():
            completions = sample_completions(
                PROMPTS[own],
                seeds[own],
                forward,
                Limits(max_new_tokens=NUM_TOKENS, end_ids=frozenset(range(60, 64)), most_tokens=None),
                Sampling(temperature=2.0, top_k=30, top_p=0.98),
                topology=topology,
                rows_at_once=3,
                uses_cache=topology.pipeline == topology.context == 1,
            )
        self.completions.append(completions)
        gathered = Counter()
        for channel, count in sent.num_bytes.items():
            gathered[channel.kind] += count
        self.gathered_bytes.append(gathered[ALL_GATHER])


def train(folder, kind, sharding, layout, has_room=True):
    if not has_room:
        import hfdist.strategies.deepspeed.zero
        import hfdist.strategies.fsdp

        for module in (hfdist.strategies.deepspeed.zero, hfdist.strategies.fsdp):
            module.have_room = lambda *_: False
    samples = Samples()
    strategy = make_strategy(sharding, **layout)
    arguments = {"max_steps": 2, "learning_rate": 1e-3}
    trainer = make_trainer(folder, strategy, model=lambda: make_model(kind), arguments=arguments, callbacks=[])
    samples.trainer = trainer
    trainer.add_callback(samples)
    trainer.train()
    return samples.completions, samples.gathered_bytes, history(trainer), strategy.topology.data_rank


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return {
        kind: run_ranks(train, 1, tmp_path_factory.mktemp(kind), kind, Sharding.none, {}, group=False)[0]
        for kind in ("llama", "mixtral")
    }


def check(reference, ranks):
    wanted, _, losses, _ = reference
    for completions, _, found, data_rank in ranks:
        assert found == [pytest.approx(entry, rel=1e-4) for entry in losses]
        for of_step, whole in zip(completions, wanted, strict=True):
            share = len(of_step)
            assert of_step == whole[data_rank * share : (data_rank + 1) * share]


def test_completions_end_at_different_lengths_and_change(reference):
    completions = reference["llama"][0]
    assert len(completions) == 3
    assert len({len(row) for row in completions[0]}) > 2
    assert all(row[-1] >= 60 or len(row) == NUM_TOKENS for step in completions for row in step)


@pytest.mark.parametrize(
    ("sharding", "layout"),
    [
        (Sharding.none, {}),
        (Sharding.zero1, {}),
        (Sharding.zero2, {}),
        (Sharding.none, {"tensor": 2}),
        (Sharding.none, {"pipeline": 2}),
        (Sharding.none, {"context": 2}),
        (Sharding.fsdp2, {"context": 2}),
    ],
    ids=str,
)
def test_every_layout_samples_the_same(tmp_path, reference, sharding, layout):
    check(reference["llama"], run_ranks(train, 2, tmp_path, "llama", sharding, layout))


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("sharding", [Sharding.fsdp2, Sharding.zero3])
def test_sharded_weights_are_gathered_once_where_there_is_room(tmp_path, reference, sharding, has_room):
    # So that DeepSpeed partitions matrices as small as these.
    small = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}
    layout = {"deepspeed": small} if sharding is Sharding.zero3 else {}
    ranks = run_ranks(train, 2, tmp_path, "llama", sharding, layout, has_room)
    check(reference["llama"], ranks)
    sent_once = sum(parameter.nbytes for parameter in make_model("llama").parameters()) / 2
    for _, gathered_bytes, _, _ in ranks:
        for num_bytes in gathered_bytes:
            # Small ones that ZeRO-3 keeps whole need not travel.
            times = num_bytes / sent_once
            assert 0.9 < times < 1.1 if has_room else times > 3


def test_ranks_that_share_experts_wait_for_each_other(tmp_path, reference):
    check(reference["mixtral"], run_ranks(train, 2, tmp_path, "mixtral", Sharding.fsdp2, {"expert": 2}))


def test_a_sharded_pipeline_samples_the_same(tmp_path, reference):
    layout = {"pipeline": 2}
    check(reference["llama"], run_ranks(train, 4, tmp_path, "llama", Sharding.fsdp2, layout))
