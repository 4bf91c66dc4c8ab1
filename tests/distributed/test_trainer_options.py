"""What users of the Trainer set, pass or override, with a strategy: schedules, callbacks, losses, loaders."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, OneCycleLR, SequentialLR
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import HPSearchBackend

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.checkpointing import checkpointer
from hfdist.trainer.trainer import RunOptions
from tests.distributed.test_trainer import (
    LENGTH,
    STEPS,
    history,
    make_arguments,
    make_model,
    make_strategy,
    uneven_items,
)

pytestmark = pytest.mark.distributed

SAVING = {"save_strategy": "steps", "save_steps": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 1}


def make_trainer(folder, trainer_class=hfdist.Trainer, *, optimizers=None, arguments=None, **named):
    strategy = make_strategy(Sharding.none)
    arguments = make_arguments(folder, strategy, **(arguments or {}))
    model, items = make_model(), uneven_items()
    made = {} if optimizers is None else {"optimizers": optimizers(model)}
    named = {"train_dataset": items, "eval_dataset": items[:6]} | made | named
    return trainer_class(model, arguments, strategy=strategy, **named)


def cosine(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, CosineAnnealingLR(optimizer, STEPS)


def by_milestones(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, SequentialLR(optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [2])], milestones=[1])


def one_cycle(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)


def plateau(model):
    return None, None


SCHEDULES = {
    "cosine": (cosine, {}),
    "milestones": (by_milestones, {}),
    "one cycle": (one_cycle, {}),
    "plateau": (plateau, {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
                          "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}}),
}  # fmt: skip


def interrupted(folder, name):
    optimizers, more = SCHEDULES[name]
    more = SAVING | EVALUATING | more
    whole = make_trainer(folder / "whole", optimizers=optimizers, arguments=more)
    whole.train()
    resumed = make_trainer(folder / "resumed", optimizers=optimizers, arguments=more)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    rates = [[e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in (whole, resumed)]
    return history(whole), history(resumed), *rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_with_a_state_of_its_own_goes_on(tmp_path, name):
    whole, resumed, rates, resumed_rates = run_ranks(interrupted, 1, tmp_path, name)[0]
    assert resumed == whole
    assert resumed_rates == rates
    assert len(set(rates)) > 1


def patience(folder):
    arguments = SAVING | EVALUATING | {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(folder, arguments=arguments, callbacks=[EarlyStoppingCallback(2)])
    trainer.train()
    states = {}
    for path in sorted(folder.glob("checkpoint-*")):
        state = json.loads((path / "trainer_state.json").read_text())
        states[path.name] = state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
    return states


def test_a_checkpoint_keeps_what_callbacks_have_counted(tmp_path):
    states = run_ranks(patience, 1, tmp_path)[0]
    # Losses fall, and larger ones are better here.
    counted = [state["early_stopping_patience_counter"] for state in states.values()]
    assert counted == [0, 1, 2]


class Listens(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append(dict(logs))

    def on_train_end(self, args, state, control, **kwargs):
        self.told.append("end")


def saves_reported(folder):
    listens = Listens()
    # Slow enough for the next save to wait for it.
    newest = checkpointer.newest_entries
    checkpointer.newest_entries = lambda history: (time.sleep(0.2), newest(history))[1]
    trainer = make_trainer(folder, arguments=SAVING, callbacks=[listens])
    trainer.train()
    return listens.told, trainer.state.log_history


def test_every_save_is_reported_once_before_the_training_ends(tmp_path):
    told, log_history = run_ranks(saves_reported, 1, tmp_path)[0]
    for reports in (told[:-1], log_history):
        reports = [line for line in reports if "checkpoint/step" in line]
        assert [line["checkpoint/step"] for line in reports] == list(range(1, STEPS + 1))
        assert all(line["checkpoint/bytes"] > 0 for line in reports)
        assert all(line["checkpoint/seconds"] >= line["checkpoint/stall_seconds"] > 0 for line in reports)
    # As in the original.
    assert told[-1] == "end"
    assert "train_loss" in told[-2]
    assert "train_loss" in log_history[-1]


def history_of_a_run(folder):
    checkpointer.NUM_ENTRIES = 1
    trainer = make_trainer(folder, arguments={"logging_steps": 1}, options=RunOptions(run_values={}))
    trainer.train()
    return trainer.state.log_history


def test_a_run_holds_the_newest_of_the_history(tmp_path):
    log_history = run_ranks(history_of_a_run, 1, tmp_path)[0]
    # The line at the end comes behind the newest step.
    assert [entry["step"] for entry in log_history] == [STEPS, STEPS]


def folder_of_a_trial(folder):
    trainer = make_trainer(folder, arguments=SAVING)
    # As Optuna's backend and `train(trial=...)` leave it.
    trainer.hp_search_backend, trainer._trial = HPSearchBackend.OPTUNA, SimpleNamespace(number=3)
    return str(trainer.checkpointer.folder)


def test_the_checkpoints_of_a_trial_stand_in_a_folder_of_its_own(tmp_path):
    assert run_ranks(folder_of_a_trial, 1, tmp_path) == [str(tmp_path / "run-3")]


def search(folder):
    make_trainer(folder, arguments=SAVING).hyperparameter_search()


def test_trials_of_several_ranks_that_save_are_refused(tmp_path):
    with pytest.raises(RankFailed, match="only rank 0 knows the folder of a trial"):
        run_ranks(search, 2, tmp_path)


def constant_loss(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].sum() * 0 + 7.0


def doubled_loss(outputs, labels, num_items_in_batch):
    # Asks for the number, as a function may that divides a sum.
    logits = outputs["logits"]
    return 2 * ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch + 0)


def evaluated(folder, function):
    trainer = make_trainer(folder, compute_loss_func=function, arguments={"learning_rate": 0.0})
    trainer.train()
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_of_the_users_own_is_evaluated(tmp_path, world_size):
    plain = run_ranks(evaluated, 1, tmp_path, None)[0]
    doubled = run_ranks(evaluated, world_size, tmp_path, doubled_loss)
    assert doubled == pytest.approx([2 * plain] * world_size, rel=1e-6)


def test_a_mean_of_the_users_own_is_evaluated(tmp_path):
    assert run_ranks(evaluated, 1, tmp_path, constant_loss) == pytest.approx([7.0])


class OwnLoader(hfdist.Trainer):
    """Evaluates batches of its own."""

    def get_eval_dataloader(self, eval_dataset=None):
        return torch.utils.data.DataLoader(uneven_items(4), batch_size=2, collate_fn=self.data_collator)


def with_own_loader(folder):
    trainer = make_trainer(folder, OwnLoader)
    trainer.train()
    return trainer.evaluate()["eval_tokens"]


def test_a_class_may_bring_a_loader_of_its_own(tmp_path):
    expected = sum(int((item["labels"][1:] != -100).sum()) for item in uneven_items(4))
    assert run_ranks(with_own_loader, 1, tmp_path) == [expected]


class Endless(torch.utils.data.IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(uneven_items(2))


def without_length(folder):
    make_trainer(folder, eval_dataset=Endless()).evaluate()


def test_held_out_data_without_a_length_are_refused(tmp_path):
    with pytest.raises(RankFailed, match="held-out data need a length"):
        run_ranks(without_length, 1, tmp_path)


def counted(folder):
    trainer = make_trainer(folder, arguments=SAVING | {"include_num_input_tokens_seen": True})
    trainer.train()
    again = make_trainer(folder, arguments=SAVING | {"max_steps": STEPS})
    again.train(resume_from_checkpoint=True)
    return trainer.state.num_input_tokens_seen, again.state.num_input_tokens_seen, again.state.global_step


def test_tokens_are_counted_once_and_the_last_checkpoint_is_found(tmp_path):
    num_tokens = STEPS * 8 * LENGTH
    assert run_ranks(counted, 1, tmp_path) == [(num_tokens, num_tokens, STEPS)]
