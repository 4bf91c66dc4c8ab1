"""The Trainer from Python: as the original without a strategy, weighted by tokens with one."""

import pytest
import torch
import transformers
from torch import nn

import hfdist
from hfdist.config.optimizer import OptimizerConfig, Schedule
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Sharding
from hfdist.config.train import TrainConfig
from hfdist.errors import ConfigError
from hfdist.run.training_arguments import build_arguments, check_further_arguments
from hfdist.testing import RankFailed, run_ranks
from tests.distributed.trainers import (
    GLOBAL_BATCH,
    LENGTH,
    NoLossKwargs,
    history,
    make_arguments,
    make_model,
    make_strategy,
    make_trainer,
    on_ranks,
    uneven_items,
)

pytestmark = pytest.mark.distributed


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


def one_step_on_everything(folder):
    trainer = make_trainer(
        folder,
        make_strategy(micro_batch_size=2),
        model=NoLossKwargs,
        arguments={"per_device_train_batch_size": 2, "max_steps": 1},
        train_dataset=uneven_items(GLOBAL_BATCH),
    )
    trainer.train()
    return history(trainer)[0][0]


def test_the_loss_is_the_mean_over_all_target_tokens(tmp_path):
    """Against the plain formula: the sum over all targets of the global batch, over their number."""
    model, items = NoLossKwargs(), uneven_items(GLOBAL_BATCH)
    with torch.no_grad():
        logits = [model(input_ids=item["input_ids"][None])["logits"][0, :-1] for item in items]
    targets = [item["labels"][1:] for item in items]
    expected = nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets)).item()
    for world_size in (1, 2):
        losses = run_ranks(one_step_on_everything, world_size, tmp_path)
        assert losses == pytest.approx([expected] * world_size, rel=1e-6)


def held_out_loss(folder, sharding, eval_batch_size):
    arguments = {"per_device_eval_batch_size": eval_batch_size}
    trainer = make_trainer(folder, make_strategy(sharding), arguments=arguments, eval_dataset=uneven_items(11))
    trainer.train()
    return trainer.evaluate()["eval_loss"]


def test_the_held_out_loss_does_not_depend_on_batch_size_or_ranks(tmp_path):
    values = [
        run_ranks(held_out_loss, world_size, tmp_path, sharding, eval_batch_size)[0]
        for sharding, world_size, eval_batch_size in (
            (Sharding.none, 1, 1), (Sharding.none, 1, 11), (Sharding.none, 2, 3), (Sharding.zero3, 2, 4)
        )
    ]  # fmt: skip
    assert values == pytest.approx([values[0]] * 4, rel=1e-6)


@on_ranks(2)
def test_a_preset_by_its_name_trains_as_its_strategy_does(tmp_path):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    # Made before the strategy, as is the model.
    model, args = make_model(), make_arguments(tmp_path, **sizes)
    named = hfdist.Trainer(model, args, strategy="zero3", train_dataset=uneven_items())
    named.train()
    assert (named.strategy.batch.global_batch_size, named.is_deepspeed_enabled) == (GLOBAL_BATCH, True)
    alone = make_trainer(tmp_path, make_strategy(micro_batch_size=2))
    alone.train()
    assert torch.tensor(history(named)) == pytest.approx(torch.tensor(history(alone)), rel=1e-4)


def forgotten(folder):
    strategy = make_strategy(Sharding.zero1)
    hfdist.Trainer(make_model(), make_arguments(folder), strategy=strategy, train_dataset=uneven_items())


def test_arguments_of_another_layout_are_refused(tmp_path):
    with pytest.raises(RankFailed, match="were not made for this strategy"):
        run_ranks(forgotten, 1, tmp_path)


@pytest.mark.parametrize("schedule", list(Schedule))
@on_ranks(1)
def test_schedules_and_weight_decay(tmp_path, schedule):
    # 2.5 steps of warm-up in tokens are 3 whole steps.
    tokens = round(2.5 * GLOBAL_BATCH * LENGTH)
    optimizer = OptimizerConfig(lr=1.0, schedule=schedule, warmup_tokens=tokens, decay_fraction=0.25)
    config = RunConfig(optimizer=optimizer, train=TrainConfig(max_steps=20, global_batch_size=GLOBAL_BATCH))
    config.run.dir = str(tmp_path)
    strategy = make_strategy()
    arguments = build_arguments(config, strategy, max_steps=20)
    trainer = hfdist.Trainer(make_model(), arguments, strategy=strategy, train_dataset=uneven_items())
    groups = trainer.create_optimizer().param_groups
    trainer.create_scheduler(20)
    found = []
    for _ in range(20):
        found.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.lr_scheduler.step()
    # transformers warms up from zero, but for wsd from its lowest rate.
    first = 0.1 if schedule is Schedule.wsd else 0.0
    assert found[:4] == pytest.approx([first + (1 - first) * step / 3 for step in range(4)])
    assert max(found) == 1.0
    falling = {"cosine": 1.0, "linear": 1.0, "wsd": 0.25, "constant": 0.0}[schedule.value]
    assert sum(rate < 1 for rate in found[4:]) == pytest.approx(16 * falling, abs=2)
    floor = {"cosine": 0.1, "wsd": 0.1, "linear": 0.0, "constant": 1.0}[schedule.value]
    assert found[-1] == pytest.approx(floor, abs=0.1)
    decays = {group["weight_decay"]: sorted({p.dim() for p in group["params"]}) for group in groups}
    assert decays == {0.1: [2], 0.0: [1]}


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        ({"neftune_noise_alfa": 5}, "train.arguments.neftune_noise_alfa", "train.arguments.neftune_noise_alpha"),
        ({"learning_rate": 1e-3}, "train.arguments.learning_rate", "hfdist sets this argument itself"),
        ({"eval_on_start": True}, "train.arguments.eval_on_start", "evaluate.at_start=true"),
        ({"push_to_hub": True}, "train.arguments.push_to_hub", "export.push_to=OWNER/NAME"),
        ({"deepspeed": {}}, "train.arguments.deepspeed", "hfdist sets this argument itself"),
    ],
)
def test_mistakes_in_further_arguments(arguments, where, message):
    with pytest.raises(ConfigError) as caught:
        check_further_arguments(RunConfig(train=TrainConfig(arguments=arguments)), make_strategy().batch)
    assert caught.value.where == where
    assert message in str(caught.value)
