"""Who takes part: each trains one `Work`, reading its batches from memory; the last row is a whole recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.nn.utils import clip_grad_norm_
from transformers import TrainerCallback, TrainingArguments

import hfdist
from benchmarks.loop.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    LOG_EVERY,
    MAX_GRAD_NORM,
    MICRO_BATCH_SIZE,
    NUM_WARMUP_STEPS,
    SEQUENCE_LENGTH,
    WEIGHT_DECAY,
    Gate,
    Work,
    make_optimizer,
    make_schedule,
)
from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.models.architecture import find_architecture
from hfdist.run.builder import Run
from hfdist.run.data import RunData, build_data

BARE, OURS, RECIPE = "bare loop", "hfdist.Trainer", "hfdist, whole recipe"
TRANSFORMERS, ACCELERATE, LIGHTNING = "transformers.Trainer", "accelerate loop", "Lightning"

Train = Callable[[Work, Gate], None]


def train_bare(work: Work, gate: Gate) -> None:
    """The limit: nothing but torch."""
    model = work.model()
    parameters = list(model.parameters())
    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer, work.num_steps)
    model.train()
    total, losses = torch.zeros(()), []
    batches = work.batches(gate, counted=True)
    for step in range(1, work.num_steps + 1):
        for _ in range(work.accumulation):
            loss = model(**next(batches)).loss
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            losses.append(total.item() / LOG_EVERY)
            total.zero_()
    gate.end(losses, version("torch"))


def train_accelerate(work: Work, gate: Gate) -> None:
    """Peer: the loop of accelerate's documentation."""
    accelerator = Accelerator(gradient_accumulation_steps=work.accumulation, cpu=True)
    model = work.model()
    plain = make_optimizer(model)
    model, optimizer, schedule = accelerator.prepare(model, plain, make_schedule(plain, work.num_steps))
    model.train()
    total, losses, step = torch.zeros(()), [], 0
    for batch in work.batches(gate, counted=True):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total += loss.detach()
            # It divides by their number, and the loss is divided by the targets of all of them already.
            accelerator.backward(loss * work.accumulation)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % LOG_EVERY == 0:
                losses.append(total.item() / LOG_EVERY)
                total.zero_()
    gate.end(losses, version("accelerate"))


class _Batches:
    def __init__(self, work: Work, gate: Gate) -> None:
        self._work, self._gate = work, gate

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self._work.batches(self._gate, counted=False)


class _FromMemory:
    """A Trainer whose batches are ready: no loader and no collating, as in the other loops."""

    batches: _Batches

    def get_train_dataloader(self) -> _Batches:
        return self.batches


class _Theirs(_FromMemory, transformers.Trainer):
    pass


class _Ours(_FromMemory, hfdist.Trainer):
    pass


def train_transformers(work: Work, gate: Gate) -> None:
    """Peer: the Trainer as it is."""
    arguments = _arguments(work, gradient_accumulation_steps=work.accumulation)
    _train_from_memory(_Theirs(work.model(), arguments), work, gate)


def train_hfdist(work: Work, gate: Gate) -> None:
    """Ours, with a model and batches of one's own."""
    strategy = hfdist.make_strategy(
        global_batch_size=work.accumulation * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
        max_grad_norm=MAX_GRAD_NORM,
    )
    arguments = _arguments(work, **strategy.training_arguments())
    _train_from_memory(_Ours(work.model(), arguments, strategy=strategy), work, gate)


def _train_from_memory(trainer: Any, work: Work, gate: Gate) -> None:
    # It would print each line of losses; hfdist's recipes do without it too.
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.batches = _Batches(work, gate)
    # Only its absence is noticed: batches come from the hook above.
    trainer.train_dataset = []
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    gate.end(losses, version("transformers"))


def _arguments(work: Work, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        work.folder,
        **{
            "per_device_train_batch_size": MICRO_BATCH_SIZE,
            "max_steps": work.num_steps,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPS,
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "linear",
            "warmup_steps": NUM_WARMUP_STEPS,
            "max_grad_norm": MAX_GRAD_NORM,
            "logging_steps": LOG_EVERY,
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **more,
        },
    )


class _Gated(TrainerCallback):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        self._gate.step_begins()


def recipe_config(work: Work) -> RunConfig:
    """The shipped pretraining recipe on the embedded corpus; its model is replaced by that of all."""
    return compose_config(
        [
            "model=tiny",
            f"run.dir={work.folder}/run-{work.accumulation}",
            f"data.sequence_length={SEQUENCE_LENGTH}",
            "data.workers=0",
            "data.eval_sequences=8",
            f"data.lanes={MICRO_BATCH_SIZE}",
            f"train.max_steps={work.num_steps}",
            "train.eval_every=null",
            f"train.global_batch_size={work.accumulation * MICRO_BATCH_SIZE}",
            f"train.micro_batch_size={MICRO_BATCH_SIZE}",
            f"train.max_grad_norm={MAX_GRAD_NORM}",
            f"optimizer.lr={LEARNING_RATE}",
            f"optimizer.beta1={BETAS[0]}",
            f"optimizer.beta2={BETAS[1]}",
            f"optimizer.eps={EPS}",
            f"optimizer.weight_decay={WEIGHT_DECAY}",
            "optimizer.schedule=linear",
            f"optimizer.warmup_steps={NUM_WARMUP_STEPS}",
            f"checkpoint.every={work.num_steps}",
            f"report.log_every={LOG_EVERY}",
            "report.preview=0",
        ]
    )


def recipe_data(config: RunConfig) -> RunData:
    """What the recipe reads, to be read beforehand; leaves no trace in the run's folder."""
    topology, _ = plan_run(config)
    architecture = find_architecture(config.model, sequence_length=SEQUENCE_LENGTH)
    data = build_data(config, topology, architecture)
    data.stream.ledger = None
    return data


def train_recipe(work: Work, gate: Gate) -> None:
    """Ours, with all that a recipe has: stream, ledger, metrics, bar, watch, checkpoints at the end."""
    run = Run(recipe_config(work))
    run.find_model()
    run.open_data()
    run.data = dataclasses.replace(run.data, held_out=None)
    run.open_folder()
    run.start_ranks()
    run.model = work.model()
    run.build_trainer()
    run.trainer.add_callback(_Gated(gate))
    run.train()
    gate.end([line["loss"] for line in run.trainer.state.log_history if "loss" in line], hfdist.__version__)


LOOPS: dict[str, Train] = {
    BARE: train_bare,
    OURS: train_hfdist,
    TRANSFORMERS: train_transformers,
    ACCELERATE: train_accelerate,
    RECIPE: train_recipe,
}
"""Those that run in this environment."""
