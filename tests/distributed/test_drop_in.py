"""What users of the original Trainer rely on, with a strategy: plain modules, the best model, its folders, no noise."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.errors import CheckpointError, ConfigError
from hfdist.testing import run_ranks
from tests.distributed.runs import StopsAt
from tests.distributed.test_trainer import history, make_arguments, make_model, make_strategy, uneven_items

pytestmark = pytest.mark.distributed

EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def make_trainer(folder, sharding=Sharding.none, trainer_class=hfdist.Trainer, micro=1, model=None, **more):
    strategy = make_strategy(sharding, micro)
    arguments = make_arguments(folder, strategy, **{"per_device_train_batch_size": micro} | more)
    items = uneven_items()
    model = make_model() if model is None else model
    return trainer_class(model, arguments, strategy=strategy, train_dataset=items, eval_dataset=items[:6])


# ---- the best model ----


def load_best(folder, sharding, greater_is_better):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": greater_is_better}
    trainer = make_trainer(folder, sharding, save_total_limit=1, **EACH_STEP | best)
    trainer.train()
    state = trainer.state
    losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    again = trainer.evaluate()["eval_loss"]
    return state.best_model_checkpoint, state.best_global_step, state.best_metric, losses, again


@pytest.mark.parametrize(
    ("sharding", "ranks", "greater_is_better"),
    [(Sharding.none, 1, False), (Sharding.zero2, 2, True), (Sharding.zero3, 2, True)],
)
def test_the_best_model_is_loaded_at_the_end(tmp_path, sharding, ranks, greater_is_better):
    """Training lowers the loss, so with the greater one for better the first step's is to come back."""
    for path, step, metric, losses, again in run_ranks(load_best, ranks, tmp_path, sharding, greater_is_better):
        chosen = (max if greater_is_better else min)(losses, key=losses.get)
        assert (path, step, metric) == (str(tmp_path / f"checkpoint-{chosen}"), chosen, losses[chosen])
        assert again == pytest.approx(losses[chosen], rel=1e-6)
    # The limit is one: once the training is over, only the best is left.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{chosen}"]


def retained(folder, limit):
    best = {"metric_for_best_model": "loss", "greater_is_better": True}
    make_trainer(folder, save_total_limit=limit, **EACH_STEP | best).train()
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("limit", [2, 3])
def test_the_best_checkpoint_is_never_pruned_and_counts_as_one_of_the_limit(tmp_path, limit):
    newest = [f"checkpoint-{step}" for step in (3, 4)][-limit + 1 :]
    assert run_ranks(retained, 1, tmp_path, limit)[0] == ["checkpoint-1", *newest]


def over_an_older_training(folder):
    make_trainer(folder, save_strategy="steps", save_steps=1).train()
    make_trainer(folder, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=2).train()
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_new_training_does_not_prune_its_own_checkpoints_for_an_older_ones(tmp_path):
    assert "checkpoint-2" in run_ranks(over_an_older_training, 1, tmp_path)[0]


# ---- folders ----


class Opens(TrainerCallback):
    """Uploads each checkpoint, say."""

    def __init__(self):
        self.found = []

    def on_save(self, args, state, control, **kwargs):
        self.found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "manifest.json").is_file())


def with_opens(folder):
    trainer = make_trainer(folder, save_strategy="steps", save_steps=1)
    trainer.add_callback(opens := Opens())
    trainer.train()
    return opens.found


def test_a_callback_that_is_told_of_a_save_finds_the_folder(tmp_path):
    assert run_ranks(with_opens, 1, tmp_path) == [[True] * 4]


def interrupted(folder, sharding):
    """The usual lines of a script: look for the last checkpoint, and go on from it."""
    whole = make_trainer(folder / "whole", sharding, model=WithoutConfig())
    whole.train()
    cut = make_trainer(folder / "cut", sharding, model=WithoutConfig(), save_strategy="steps", save_steps=2)
    cut.add_callback(StopsAt(2))
    cut.train()
    last = get_last_checkpoint(str(folder / "cut"))
    resumed = make_trainer(folder / "cut", sharding, model=WithoutConfig())
    resumed.train(resume_from_checkpoint=last)
    return history(whole), history(resumed), os.path.basename(last)


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


@pytest.mark.parametrize(("sharding", "ranks"), [(Sharding.none, 1), (Sharding.zero1, 2)])
def test_a_module_without_a_config_is_found_again_where_the_original_has_it(tmp_path, sharding, ranks):
    for whole, resumed, name in run_ranks(interrupted, ranks, tmp_path, sharding):
        assert name == "checkpoint-2"
        assert len(whole) == 4
        assert torch.tensor(resumed) == pytest.approx(torch.tensor(whole), rel=1e-5)
    files = {path.name for path in (tmp_path / "cut" / "checkpoint-2").iterdir()}
    assert "config.json" not in files
    assert set(load_file(tmp_path / "cut" / "checkpoint-2" / "model.safetensors")) == set(WithoutConfig().state_dict())


def beside_an_original_one(folder):
    """The original Trainer's checkpoints are neither taken for ours nor moved."""
    theirs = folder / "checkpoint-9"
    theirs.mkdir(parents=True)
    (theirs / "optimizer.pt").write_bytes(b"")
    trainer = make_trainer(folder, save_strategy="steps", save_steps=2, save_total_limit=1)
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="unfinished checkpoint, or none"):
        trainer.train(resume_from_checkpoint=str(theirs))
    trainer.train()
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_of_the_original_stay_as_they_are(tmp_path):
    assert run_ranks(beside_an_original_one, 1, tmp_path)[0] == ["checkpoint-4", "checkpoint-9"]


def twice(folder, trainer_class, **named):
    strategy = make_strategy(Sharding.none, 8)
    arguments = make_arguments(folder, strategy, per_device_train_batch_size=8)
    items, seeds = uneven_items(), []

    def model_init():
        seeds.append(torch.initial_seed())
        return make_model()

    named = {"strategy": strategy} if trainer_class is hfdist.Trainer else {}
    trainer = trainer_class(args=arguments, model_init=model_init, train_dataset=items, **named)
    found = []
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


def with_strict_overrides(folder, has_strategy):
    more = EACH_STEP | {"max_steps": 2}
    if has_strategy:
        trainer = make_trainer(folder, trainer_class=Mine, **more)
    else:
        items = uneven_items()
        trainer = Mine(make_model(), make_arguments(folder, **more), train_dataset=items, eval_dataset=items[:6])
    trainer.train()
    trainer.evaluate()
    trainer.predict(uneven_items(2))
    trainer.save_model(output_dir=str(folder / "model"))
    trainer.log({"mine": 1.0})
    return (folder / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("has_strategy", [False, True])
def test_overrides_are_given_what_the_original_gives_them(tmp_path, has_strategy):
    assert run_ranks(with_strict_overrides, 1, tmp_path, has_strategy) == [True]


# ---- quiet ----

NOISE = ("(from args) !=", "accumulation steps mismatch", "find_unused_parameters")


def in_another_layout(folder):
    make_trainer(folder, Sharding.none, micro=2, save_strategy="steps", save_steps=2, max_steps=2).train()
    trainer = make_trainer(folder, Sharding.zero1, micro=1, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=True)
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    return state["train_batch_size"], trainer.args.per_device_train_batch_size


def test_a_change_of_layout_says_nothing_that_is_no_mistake(tmp_path, capfd):
    assert run_ranks(in_another_layout, 2, tmp_path) == [(1, 1)] * 2
    said = "".join(capfd.readouterr())
    assert not [noise for noise in NOISE if noise in said], said


def with_an_unused_parameter(folder):
    """What a model does not use is looked for where it is not known that there is nothing to find."""
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model.__class__ = type("Other", (type(model),), {"__init__": _with_unused})
    trainer = make_trainer(folder, model=model)
    trainer.train()
    return trainer.accelerator.ddp_handler.find_unused_parameters, len(history(trainer))


def _with_unused(self, config):
    super(type(self), self).__init__(config)
    self.unused = nn.Parameter(torch.ones(3))


def test_parameters_without_use_train_on(tmp_path):
    assert run_ranks(with_an_unused_parameter, 2, tmp_path) == [(True, 4)] * 2


def with_other_intervals(folder):
    make_trainer(folder, save_strategy="steps", save_steps=2, max_steps=2).train()
    trainer = make_trainer(folder, save_strategy="steps", save_steps=1, logging_steps=2, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    losses = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    return sorted(path.name for path in folder.glob("checkpoint-*")), losses


def test_a_resume_saves_and_logs_as_often_as_its_own_arguments_say(tmp_path, capfd):
    names = [f"checkpoint-{step}" for step in (2, 3, 4)]
    assert run_ranks(with_other_intervals, 1, tmp_path) == [(names, [1, 2, 4])]
    assert "(from args) !=" not in "".join(capfd.readouterr())


def test_arguments_that_would_change_the_batch_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="planned the batch"):
        make_trainer(tmp_path, auto_find_batch_size=True)
