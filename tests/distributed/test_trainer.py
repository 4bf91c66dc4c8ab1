"""The Trainer from Python: as the original without a strategy, weighted by tokens with one."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

import hfdist
from hfdist.config.batch import plan_batch
from hfdist.config.optimizer import OptimizerConfig, Schedule
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.errors import ConfigError
from hfdist.models.build import initialize_by_name
from hfdist.models.partitioning import Partitioning
from hfdist.strategies.select import select_strategy
from hfdist.testing import RankFailed, run_ranks
from hfdist.topology import Degrees, Topology
from hfdist.trainer.run.training_arguments import build_arguments, check_further_arguments

pytestmark = pytest.mark.distributed

LENGTH, GLOBAL_BATCH, STEPS = 16, 8, 4
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip


def uneven_items(num_items=GLOBAL_BATCH * STEPS):
    """Sequences of which very different shares are targets."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for number in range(num_items):
        ids = torch.randint(0, 64, (LENGTH,), generator=generator)
        items.append({"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < number * 5 % LENGTH, -100, ids)})
    return items


class NoLossKwargs(nn.Module):
    """A model of the older kind: its forward takes no further arguments and averages over its own batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.config = AutoConfig.for_model("llama", **TINY)

    def forward(self, input_ids=None, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def make_model(kind="llama"):
    if kind == "plain":
        return NoLossKwargs()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    layout = make_strategy(Sharding.zero3) if is_deepspeed_zero3_enabled() else Partitioning()
    initialize_by_name(model, 0, layout)
    return model


def make_strategy(sharding, micro_batch_size=1):
    topology = Topology.from_environment(Degrees())
    batch = plan_batch(
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro_batch_size,
        data_size=topology.data_size,
        sequence_length=LENGTH,
        lanes=48,
    )
    return select_strategy(StrategyConfig(sharding=sharding), TrainConfig(), topology=topology, batch=batch)


def make_arguments(folder, strategy=None, **more):
    fields = {"per_device_train_batch_size": 1, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1,
              "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    arguments = TrainingArguments(str(folder), **fields | (strategy.training_arguments() if strategy else {}) | more)
    if strategy is not None:
        strategy.start()
    return arguments


def history(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def with_strategy(folder, kind, sharding, eval_batch_size=2):
    strategy = make_strategy(sharding)
    arguments = make_arguments(folder, strategy, per_device_eval_batch_size=eval_batch_size)
    items = uneven_items()
    trainer = hfdist.Trainer(
        make_model(kind), arguments, strategy=strategy, train_dataset=items, eval_dataset=items[:11]
    )
    trainer.train()
    return history(trainer), trainer.evaluate()["eval_loss"]


def without_strategy(folder, trainer_class):
    arguments = make_arguments(folder, gradient_accumulation_steps=GLOBAL_BATCH)
    items = uneven_items()
    trainer = trainer_class(make_model(), arguments, train_dataset=items, eval_dataset=items[:8])
    trainer.train()
    return history(trainer), trainer.evaluate()["eval_loss"]


def test_without_a_strategy_it_is_the_original(tmp_path):
    original = run_ranks(without_strategy, 1, tmp_path, transformers.Trainer, group=False)
    ours = run_ranks(without_strategy, 1, tmp_path, hfdist.Trainer, group=False)
    assert ours == original


@pytest.mark.parametrize(("kind", "world_size"), [("llama", 4), ("plain", 2)])
def test_the_loss_is_weighted_by_tokens_of_the_global_batch(tmp_path, kind, world_size):
    """Uneven targets on different ranks and micro batches must not bias loss, gradient or evaluation."""
    reference = run_ranks(with_strategy, 1, tmp_path, kind, Sharding.none)[0]
    for answer in run_ranks(with_strategy, world_size, tmp_path, kind, Sharding.none):
        assert torch.tensor(answer[0]) == pytest.approx(torch.tensor(reference[0]), rel=1e-5)
        assert answer[1] == pytest.approx(reference[1], rel=1e-6)


def one_step_on_everything(folder):
    strategy = make_strategy(Sharding.none, micro_batch_size=2)
    trainer = hfdist.Trainer(
        make_model("plain"),
        make_arguments(folder, strategy, per_device_train_batch_size=2, max_steps=1),
        strategy=strategy,
        train_dataset=uneven_items(GLOBAL_BATCH),
    )
    trainer.train()
    return history(trainer)[0][0]


def test_the_loss_is_the_mean_over_all_target_tokens(tmp_path):
    """Against the plain formula: the sum over all targets of the global batch, over their number."""
    model, items = make_model("plain"), uneven_items(GLOBAL_BATCH)
    with torch.no_grad():
        logits = [model(input_ids=item["input_ids"][None])["logits"][0, :-1] for item in items]
    targets = [item["labels"][1:] for item in items]
    expected = nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets)).item()
    for world_size in (1, 2):
        losses = run_ranks(one_step_on_everything, world_size, tmp_path)
        assert losses == pytest.approx([expected] * world_size, rel=1e-6)


def test_the_held_out_loss_does_not_depend_on_batch_size_or_ranks(tmp_path):
    values = [
        run_ranks(with_strategy, world_size, tmp_path, "llama", sharding, eval_batch_size)[0][1]
        for sharding, world_size, eval_batch_size in (
            (Sharding.none, 1, 1), (Sharding.none, 1, 11), (Sharding.none, 2, 3), (Sharding.zero3, 2, 4)
        )
    ]  # fmt: skip
    assert values == pytest.approx([values[0]] * 4, rel=1e-6)


def test_predictions_are_kept(tmp_path):
    strategy, items = make_strategy(Sharding.none), uneven_items(3)
    args = make_arguments(tmp_path, strategy)
    trainer = hfdist.Trainer(make_model(), args, strategy=strategy, train_dataset=items, eval_dataset=items)
    assert len(trainer.predict(items).predictions) == 3


def forgotten(folder):
    strategy = make_strategy(Sharding.zero1)
    hfdist.Trainer(make_model(), make_arguments(folder), strategy=strategy, train_dataset=uneven_items())


def test_arguments_of_another_layout_are_refused(tmp_path):
    with pytest.raises(RankFailed, match="were not made for this strategy"):
        run_ranks(forgotten, 1, tmp_path)


def rates(folder, optimizer):
    config = RunConfig(optimizer=optimizer, train=TrainConfig(max_steps=20, global_batch_size=GLOBAL_BATCH))
    config.run.dir = str(folder)
    strategy = make_strategy(Sharding.none)
    trainer = hfdist.Trainer(
        make_model(),
        build_arguments(config, strategy, max_steps=config.train.max_steps),
        strategy=strategy,
        train_dataset=uneven_items(),
    )
    groups = trainer.create_optimizer().param_groups
    trainer.create_scheduler(20)
    found = []
    for _ in range(20):
        found.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.lr_scheduler.step()
    decays = {group["weight_decay"]: sorted({p.dim() for p in group["params"]}) for group in groups}
    return found, decays


@pytest.mark.parametrize("schedule", list(Schedule))
def test_schedules_and_weight_decay(tmp_path, schedule):
    # 2.5 steps of warm-up in tokens are 3 whole steps.
    tokens = round(2.5 * GLOBAL_BATCH * LENGTH)
    optimizer = OptimizerConfig(lr=1.0, schedule=schedule, warmup_tokens=tokens, decay_fraction=0.25)
    found, decays = run_ranks(rates, 1, tmp_path, optimizer)[0]
    # transformers warms up from zero, but for wsd from its lowest rate.
    first = 0.1 if schedule is Schedule.wsd else 0.0
    assert found[:4] == pytest.approx([first + (1 - first) * step / 3 for step in range(4)])
    assert max(found) == 1.0
    falling = {"cosine": 1.0, "linear": 1.0, "wsd": 0.25, "constant": 0.0}[schedule.value]
    assert sum(rate < 1 for rate in found[4:]) == pytest.approx(16 * falling, abs=2)
    floor = {"cosine": 0.1, "wsd": 0.1, "linear": 0.0, "constant": 1.0}[schedule.value]
    assert found[-1] == pytest.approx(floor, abs=0.1)
    assert decays == {0.1: [2], 0.0: [1]}


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        ({"neftune_noise_alfa": 5}, "train.arguments.neftune_noise_alfa", "train.arguments.neftune_noise_alpha"),
        ({"learning_rate": 1e-3}, "train.arguments.learning_rate", "hfdist sets this argument itself"),
        ({"eval_on_start": True}, "train.arguments.eval_on_start", "set evaluate.at_start instead"),
        ({"deepspeed": {}}, "train.arguments.deepspeed", "hfdist sets this argument itself"),
    ],
)
def test_mistakes_in_further_arguments(arguments, where, message):
    with pytest.raises(ConfigError) as caught:
        check_further_arguments(RunConfig(train=TrainConfig(arguments=arguments)), make_strategy(Sharding.none).batch)
    assert caught.value.where == where
    assert message in str(caught.value)
