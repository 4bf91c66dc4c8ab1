"""What users of the original Trainer rely on, with a strategy: plain modules, the best model, its folders, no noise."""

import json

import pytest
import torch
from accelerate import ParallelismConfig
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.errors import CheckpointError, ConfigError
from hfdist.testing import run_ranks
from tests.distributed.runs import StopsAt
from tests.distributed.trainers import (
    history,
    make_arguments,
    make_model,
    make_strategy,
    make_trainer,
    on_ranks,
    uneven_items,
)

pytestmark = pytest.mark.distributed

EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def train(folder, strategy=None, **arguments):
    trainer = make_trainer(folder, strategy, arguments=arguments)
    trainer.train()
    return trainer


def saved(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# ---- the best model ----


def load_best(folder, sharding, greater_is_better):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": greater_is_better}
    trainer = train(folder, make_strategy(sharding), save_total_limit=1, **EACH_STEP | best)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    chosen = (max if greater_is_better else min)(losses, key=losses.get)
    state, expected = trainer.state, (str(folder / f"checkpoint-{chosen}"), chosen, losses[chosen])
    assert (state.best_model_checkpoint, state.best_global_step, state.best_metric) == expected
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[chosen], rel=1e-6)
    # The limit is one: once the training is over, only the best is left.
    assert saved(folder) == [f"checkpoint-{chosen}"]


@pytest.mark.parametrize(
    ("sharding", "ranks", "greater_is_better"), [(Sharding.none, 1, False), (Sharding.zero3, 2, True)]
)
def test_the_best_model_is_loaded_at_the_end(tmp_path, sharding, ranks, greater_is_better):
    """Training lowers the loss, so with the greater one for better the first step's is to come back."""
    run_ranks(load_best, ranks, tmp_path, sharding, greater_is_better)


@on_ranks(1)
def test_the_best_checkpoint_is_never_pruned_and_counts_as_one_of_the_limit(tmp_path):
    best = {"metric_for_best_model": "loss", "greater_is_better": True}
    for limit, newest in ((2, [4]), (3, [3, 4])):
        train(tmp_path / str(limit), save_total_limit=limit, **EACH_STEP | best)
        assert saved(tmp_path / str(limit)) == [f"checkpoint-{step}" for step in (1, *newest)]


@on_ranks(1)
def test_a_new_training_does_not_prune_its_own_checkpoints_for_an_older_ones(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=1)
    train(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=2)
    assert "checkpoint-2" in saved(tmp_path)


# ---- folders ----


@on_ranks(1)
def test_a_callback_that_is_told_of_a_save_finds_the_folder(tmp_path):
    class Opens(TrainerCallback):
        """Uploads each checkpoint, say."""

        found = 0

        def on_save(self, args, state, control, **kwargs):
            assert (tmp_path / f"checkpoint-{state.global_step}" / "manifest.json").is_file()
            self.found += 1

    trainer = make_trainer(
        tmp_path, arguments={"save_strategy": "steps", "save_steps": 1}, callbacks=[opens := Opens()]
    )
    trainer.train()
    assert opens.found == 4


class WithoutConfig(nn.Module):
    """As users write one: no config, a loss of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


@on_ranks(2)
def test_a_module_without_a_config_is_found_again_where_the_original_has_it(tmp_path):
    """The usual lines of a script: look for the last checkpoint, and go on from it."""

    def make(folder, **arguments):
        return make_trainer(folder, make_strategy(Sharding.zero1), model=WithoutConfig, arguments=arguments)

    whole = make(tmp_path / "whole")
    whole.train()
    cut = make(tmp_path / "cut", save_strategy="steps", save_steps=2)
    cut.add_callback(StopsAt(2))
    cut.train()
    last = get_last_checkpoint(str(tmp_path / "cut"))
    assert last == str(tmp_path / "cut" / "checkpoint-2")
    resumed = make(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=last)
    assert len(history(whole)) == 4
    assert torch.tensor(history(resumed)) == pytest.approx(torch.tensor(history(whole)), rel=1e-5)
    files = {path.name for path in (tmp_path / "cut" / "checkpoint-2").iterdir()}
    assert "config.json" not in files
    assert set(load_file(tmp_path / "cut" / "checkpoint-2" / "model.safetensors")) == set(WithoutConfig().state_dict())


@on_ranks(1)
def test_checkpoints_of_the_original_stay_as_they_are(tmp_path):
    """They are neither taken for ours nor moved."""
    theirs = tmp_path / "checkpoint-9"
    theirs.mkdir(parents=True)
    (theirs / "optimizer.pt").write_bytes(b"")
    trainer = make_trainer(tmp_path, arguments={"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1})
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="no checkpoint of hfdist"):
        trainer.train(resume_from_checkpoint=str(theirs))
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-9"]


def twice(folder, trainer_class):
    strategy = make_strategy(micro_batch_size=8)
    arguments = make_arguments(folder, strategy, per_device_train_batch_size=8)
    seeds, found = [], []

    def model_init():
        seeds.append(torch.initial_seed())
        return make_model()

    named = {"strategy": strategy} if trainer_class is hfdist.Trainer else {}
    trainer = trainer_class(args=arguments, model_init=model_init, train_dataset=uneven_items(), **named)
    for _ in range(2):
        trainer.train()
        found.append(history(trainer))
    return found, seeds


def test_model_init_makes_a_new_model_for_each_training(tmp_path):
    ours, theirs = (run_ranks(twice, 1, tmp_path, kind)[0] for kind in (hfdist.Trainer, Trainer))
    assert ours[1] == theirs[1]
    assert torch.tensor(ours[0]) == pytest.approx(torch.tensor(theirs[0]), rel=1e-5)
    assert ours[0][0] == ours[0][1]


# ---- by name ----


class Strict(Trainer):
    """Overrides as users write them, for what the original passes."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    def save_model(self, output_dir=None, **kwargs):
        super().save_model(output_dir, **kwargs)

    def log(self, logs, *args):
        super().log(logs, *args)

    def evaluation_loop(self, dataloader, **kwargs):
        return super().evaluation_loop(dataloader, **kwargs)


class Mine(hfdist.DistributedTrainerMixin, Strict): ...


@pytest.mark.parametrize("has_strategy", [False, True])
@on_ranks(1)
def test_overrides_are_given_what_the_original_gives_them(tmp_path, has_strategy):
    more = EACH_STEP | {"max_steps": 2}
    if has_strategy:
        trainer = make_trainer(tmp_path, kind=Mine, arguments=more)
    else:
        items = uneven_items()
        trainer = Mine(make_model(), make_arguments(tmp_path, **more), train_dataset=items, eval_dataset=items[:6])
    trainer.train()
    trainer.evaluate()
    assert len(trainer.predict(uneven_items(3)).predictions) == 3
    trainer.save_model(output_dir=str(tmp_path / "model"))
    trainer.log({"mine": 1.0})
    assert (tmp_path / "model" / "model.safetensors").is_file()


# ---- quiet ----

NOISE = ("(from args) !=", "accumulation steps mismatch", "find_unused_parameters")


@on_ranks(2)
def in_another_layout(folder):
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(folder, make_strategy(micro_batch_size=2), per_device_train_batch_size=2, max_steps=2, **saving)
    strategy = make_strategy(Sharding.zero1, deepspeed=str(folder / "ds.json"))
    trainer = make_trainer(folder, strategy, arguments=saving)
    trainer.train(resume_from_checkpoint=True)
    # Of DeepSpeed's engine: the file has reached it.
    assert trainer.model_wrapped.zero_round_robin_gradients()
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["train_batch_size"] == trainer.args.per_device_train_batch_size == 1


def test_a_change_of_layout_says_nothing_that_is_no_mistake(tmp_path, capfd):
    zero = {"stage": 1, "round_robin_gradients": True, "reduce_bucket_size": "auto"}
    file = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero}
    (tmp_path / "ds.json").write_text(json.dumps(file))
    in_another_layout(folder=tmp_path)
    said = "".join(capfd.readouterr())
    assert not [noise for noise in NOISE if noise in said], said


def _with_unused(self, config):
    super(type(self), self).__init__(config)
    self.unused = nn.Parameter(torch.ones(3))


@on_ranks(2)
def test_parameters_without_use_train_on(tmp_path):
    """What a model does not use is looked for where it is not known that there is nothing to find."""
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model.__class__ = type("Other", (type(model),), {"__init__": _with_unused})
    trainer = make_trainer(tmp_path, model=model)
    trainer.train()
    assert trainer.accelerator.ddp_handler.find_unused_parameters
    assert len(history(trainer)) == 4


@on_ranks(1)
def with_other_intervals(folder):
    train(folder, save_strategy="steps", save_steps=2, max_steps=2)
    trainer = make_trainer(folder, arguments={"save_strategy": "steps", "save_steps": 1, "logging_steps": 2})
    trainer.train(resume_from_checkpoint=True)
    assert saved(folder) == [f"checkpoint-{step}" for step in (2, 3, 4)]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 4]


def test_a_resume_saves_and_logs_as_often_as_its_own_arguments_say(tmp_path, capfd):
    with_other_intervals(folder=tmp_path)
    assert "(from args) !=" not in "".join(capfd.readouterr())


def test_arguments_that_would_change_the_batch_are_refused(tmp_path):
    for arguments in ({"auto_find_batch_size": True}, {"accelerator_config": {"split_batches": True}}):
        with pytest.raises(ConfigError, match="planned the batch"):
            make_trainer(tmp_path, arguments=arguments)
    arguments = {"parallelism_config": ParallelismConfig(cp_size=2)}
    with pytest.raises(ConfigError, match="would share out sequences"):
        make_trainer(tmp_path, arguments=arguments)
