"""The step of an engine gives the original's bits: losses, gradients, weights, logs and events."""

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

import hfdist
from hfdist.testing import run_ranks
from hfdist.trainer.step.lean_optimizer import LeanOptimizer
from tests.distributed.trainers import (
    GLOBAL_BATCH,
    STEPS,
    NoLossKwargs,
    make_arguments,
    make_model,
    make_strategy,
    make_trainer,
    on_ranks,
    uneven_items,
)

pytestmark = pytest.mark.distributed

MICRO_BATCH = 2
CLOCK = {"tokens_per_second", "step_seconds", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Record(TrainerCallback):
    """Each event as it happens; before each step the gradients."""

    def __init__(self):
        self.events, self.gradients = [], []

    def on_step_begin(self, args, state, control, model=None, **named):
        # As somebody might who freezes a part: the Trainer puts it back at the next micro batch.
        next(model.children()).eval()

    def on_pre_optimizer_step(self, args, state, control, model=None, **named):
        self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})


def recording(name):
    given = vars(Record).get(name)

    def event(self, *args, **named):
        self.events.append(name)
        if given is not None:
            given(self, *args, **named)

    return event


for _name in EVENTS:
    setattr(Record, _name, recording(_name))


class Original(hfdist.Trainer):
    """The step of transformers and accelerate."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        del self.accelerator.prepare_optimizer

    def training_step(self, *given):
        return transformers.Trainer.training_step(self, *given)

    def _clip_grad_norm(self, model):
        return transformers.Trainer._clip_grad_norm(self, model)


def own_loss(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten()) / GLOBAL_BATCH


class OwnLossMixin:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return 2 * loss


class OwnLoss(OwnLossMixin, hfdist.Trainer):
    pass


class PlainOwnLoss(OwnLossMixin, transformers.Trainer):
    pass


class OwnLossAfterMixin(hfdist.DistributedTrainerMixin, PlainOwnLoss):
    pass


class OriginalOwnLoss(OwnLossMixin, Original):
    pass


CASES = {
    "accumulated": {},
    "whole": {"micro_batch_size": GLOBAL_BATCH},
    "not clipped": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "smoothed": {"label_smoothing_factor": 0.1},
    "averaged per process": {"average_tokens_across_devices": False},
}


def make_frozen():
    """Not all of it trains."""
    model = make_model()
    model.model.norm.weight.requires_grad_(False)
    return model


def train(folder, kind, case, model=make_frozen, **more):
    fields = dict(case)
    strategy = make_strategy(micro_batch_size=fields.pop("micro_batch_size", MICRO_BATCH))
    record = Record()
    trainer = make_trainer(folder, strategy, kind=kind, model=model, arguments=fields, callbacks=[record], **more)
    trainer.train()
    is_plain = not (fields.get("fp16") or issubclass(kind, Original))
    assert isinstance(trainer.optimizer, LeanOptimizer) == is_plain
    history = [{k: v for k, v in line.items() if k not in CLOCK} for line in trainer.state.log_history]
    assert len(record.gradients) == STEPS
    return history, record.events, record.gradients, dict(trainer.model.state_dict())


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1] == other[1]
    for gradients, others in [*zip(one[2], other[2], strict=True), (one[3], other[3])]:
        assert gradients.keys() == others.keys()
        for name, value in gradients.items():
            assert (value is None) == (others[name] is None), name
            assert value is None or torch.equal(value, others[name]), name


def both(folder, case, kinds=(hfdist.Trainer, Original), **more):
    ours, original = (train(folder, kind, case, **more) for kind in kinds)
    assert_same(ours, original)
    return len(ours[0]), ours[1].count("on_substep_end")


def test_one_process_gives_the_same_bits(tmp_path):
    def all_cases():
        both(tmp_path, {}, (OwnLossAfterMixin, OriginalOwnLoss))
        found = {name: both(tmp_path, case) for name, case in CASES.items()}
        both(tmp_path, {}, (OwnLoss, OriginalOwnLoss))
        both(tmp_path, {}, compute_loss_func=own_loss)
        both(tmp_path, {}, model=NoLossKwargs)
        return found

    [found] = run_ranks(all_cases, 1, group=False)
    # The losses of all steps and the summary; and three of four micro batches do not end a step.
    assert found["whole"] == (STEPS + 1, 0)
    assert found["accumulated"] == (STEPS + 1, STEPS * 3)


@on_ranks(2)
def test_two_ranks_give_the_same_bits(tmp_path):
    for case in ({}, {"average_tokens_across_devices": False}):
        assert both(tmp_path, case) == (STEPS + 1, STEPS)


@on_ranks(1, group=False)
def test_it_gives_the_bits_of_the_original_class(tmp_path):
    record, model = Record(), make_frozen()
    arguments = make_arguments(tmp_path, per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=4,
                               optim="adamw_torch_fused")  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=uneven_items(), callbacks=[record])
    trainer.train()
    history, events, gradients, weights = train(tmp_path, hfdist.Trainer, {"optim": "adamw_torch_fused"})
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss")
    for line, other in zip(history, trainer.state.log_history, strict=True):
        assert [line.get(name) for name in kept] == [other.get(name) for name in kept]
    assert_same(([], events, gradients, weights), ([], record.events, record.gradients, dict(model.state_dict())))
