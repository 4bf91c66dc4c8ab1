"""What users of the Trainer set, pass or override, with a strategy: schedules, callbacks, losses, loaders."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import HPSearchBackend

import hfdist
from hfdist.errors import ConfigError
from hfdist.trainer.checkpointing import checkpointer, log_history
from hfdist.trainer.run_options import RunOptions
from tests.distributed.trainers import LENGTH, STEPS, history, make_model, make_trainer, on_ranks, uneven_items

pytestmark = pytest.mark.distributed

SAVING = {"save_strategy": "steps", "save_steps": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 1}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
           "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}}  # fmt: skip


def with_milestones(folder, **arguments):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = SequentialLR(optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [2])], milestones=[1])
    return make_trainer(folder, model=model, optimizers=(optimizer, schedule), arguments=arguments)


def with_plateau(folder, **arguments):
    return make_trainer(folder, arguments=arguments | PLATEAU)


@pytest.mark.parametrize("make", [with_milestones, with_plateau])
@on_ranks(1)
def test_a_schedule_with_a_state_of_its_own_goes_on(tmp_path, make):
    whole, resumed = (make(tmp_path / name, **SAVING, **EVALUATING) for name in ("whole", "resumed"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert history(resumed) == history(whole)
    ours, theirs = ([e["learning_rate"] for e in t.state.log_history if "loss" in e] for t in (resumed, whole))
    assert ours == theirs
    assert len(set(ours)) > 1


@on_ranks(1)
def test_a_checkpoint_keeps_what_callbacks_have_counted(tmp_path):
    arguments = SAVING | EVALUATING | {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    make_trainer(tmp_path, arguments=arguments, callbacks=[EarlyStoppingCallback(2)]).train()
    # Losses fall, and larger ones are better here.
    for step, counted in ((1, 0), (2, 1), (3, 2)):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        kept = state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
        assert kept["early_stopping_patience_counter"] == counted


class Listens(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append(dict(logs))

    def on_train_end(self, args, state, control, **kwargs):
        self.told.append("end")


@on_ranks(1)
def test_every_save_is_reported_once_before_the_training_ends(tmp_path):
    # Slow enough for the next save to wait for it.
    newest = checkpointer.newest_entries
    checkpointer.newest_entries = lambda history: (time.sleep(0.2), newest(history))[1]
    trainer = make_trainer(tmp_path, arguments=SAVING, callbacks=[listens := Listens()])
    trainer.train()
    told, log_history = listens.told, trainer.state.log_history
    for reports in (told[:-1], log_history):
        reports = [line for line in reports if "checkpoint/step" in line]
        assert [line["checkpoint/step"] for line in reports] == list(range(1, STEPS + 1))
        assert all(line["checkpoint/bytes"] > 0 for line in reports)
        assert all(line["checkpoint/seconds"] >= line["checkpoint/stall_seconds"] > 0 for line in reports)
    # As in the original.
    assert told[-1] == "end"
    assert "train_loss" in told[-2]
    assert "train_loss" in log_history[-1]


@on_ranks(1)
def test_a_run_holds_the_newest_of_the_history(tmp_path):
    log_history.NUM_ENTRIES = 1
    trainer = make_trainer(tmp_path, options=RunOptions(run_values={}))
    trainer.train()
    # The line at the end comes after the newest step.
    assert [entry["step"] for entry in trainer.state.log_history] == [STEPS, STEPS]


@on_ranks(1)
def test_the_checkpoints_of_a_trial_stand_in_a_folder_of_its_own(tmp_path):
    trainer = make_trainer(tmp_path, arguments=SAVING)
    # As Optuna's backend and `train(trial=...)` leave it.
    trainer.hp_search_backend, trainer._trial = HPSearchBackend.OPTUNA, SimpleNamespace(number=3)
    assert trainer.checkpointer.folder.path == tmp_path / "run-3"


@on_ranks(2)
def test_trials_of_several_ranks_that_save_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="only rank 0 knows the folder of a trial"):
        make_trainer(tmp_path, arguments=SAVING).hyperparameter_search()


def constant_loss(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].sum() * 0 + 7.0


def doubled_loss(outputs, labels, num_items_in_batch):
    # Asks for the number, as a function may that divides a sum.
    logits = outputs["logits"]
    return 2 * ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch + 0)


@on_ranks(2)
def test_a_loss_of_the_users_own_is_evaluated(tmp_path):
    found = []
    for function in (None, doubled_loss, constant_loss):
        trainer = make_trainer(tmp_path, compute_loss_func=function, arguments={"learning_rate": 0.0})
        trainer.train()
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1:] == pytest.approx([2 * found[0], 7.0], rel=1e-6)


class OwnLoader(hfdist.Trainer):
    """Evaluates batches of its own."""

    def get_eval_dataloader(self, eval_dataset=None):
        return torch.utils.data.DataLoader(uneven_items(4), batch_size=2, collate_fn=self.data_collator)


@on_ranks(1)
def test_a_class_may_bring_a_loader_of_its_own(tmp_path):
    trainer = make_trainer(tmp_path, kind=OwnLoader)
    trainer.train()
    expected = sum(int((item["labels"][1:] != -100).sum()) for item in uneven_items(4))
    assert trainer.evaluate()["eval_tokens"] == expected


class Unsized(torch.utils.data.IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(uneven_items(2))


@on_ranks(1)
def test_held_out_data_may_have_no_length(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=Unsized())
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate(uneven_items(2))["eval_loss"]


@on_ranks(1)
def test_tokens_are_counted_once_and_the_last_checkpoint_is_found(tmp_path):
    counting = SAVING | {"include_num_input_tokens_seen": True}
    trainer, again = make_trainer(tmp_path, arguments=counting), make_trainer(tmp_path, arguments=counting)
    trainer.train()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
    for one in (trainer, again):
        assert one.state.num_input_tokens_seen == STEPS * 8 * LENGTH
        assert one.state.total_flos == trainer.state.total_flos > 0


@on_ranks(2)
def test_tokens_of_rows_of_any_length_are_those_of_all_ranks(tmp_path):
    rows = [{"input_ids": row["input_ids"][: 2 + n % 9]} for n, row in enumerate(uneven_items())]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    trainer = make_trainer(tmp_path, train_dataset=rows, arguments=SAVING | {"logging_steps": 2})
    trainer.train()
    tokens = [entry["tokens"] for entry in trainer.state.log_history if "tokens" in entry]
    assert tokens[-1] == trainer.state.num_input_tokens_seen == sum(len(row["input_ids"]) for row in rows)
