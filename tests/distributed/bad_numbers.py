"""Runs of the recipe whose numbers go wrong on chosen ranks in chosen steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
import transformers
from transformers import TrainerCallback

from hfdist.config.composition.compose import compose_config
from hfdist.run import builder
from hfdist.testing import run_ranks
from recipes.pretrain import main
from tests.distributed.runs import SMALL

ALWAYS = 1_000_000


class Kind(Enum):
    """What goes wrong."""

    nan_loss = "a loss that is no number"
    infinite_loss = "a loss that is infinite, with finite gradients"
    infinite_gradient = "a gradient that is infinite, with a finite loss"
    flipped_bit = "a bit of the first parameter, after the step"


@dataclass(frozen=True)
class Fault:
    """Where and how often."""

    kind: Kind
    steps: tuple[int, ...]
    data_rank: int = 0
    """-1: the last."""
    times: int = 1
    """How often a step fails that is done again."""


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.inf


def _break_loss(kind, loss):
    match kind:
        case Kind.nan_loss:
            return loss * torch.nan
        case Kind.infinite_loss:
            return loss + torch.inf
        case _:
            return _InfiniteGradient.apply(loss)


class _Saboteur(TrainerCallback):
    """Does it."""

    def __init__(self, faults, trainer):
        topology = trainer.strategy.topology
        self.faults = [fault for fault in faults if fault.data_rank % topology.data == topology.data_rank]
        self.trainer = trainer
        self.visits = Counter()

    def on_step_begin(self, args, state, control, **named):
        self.visits[state.global_step + 1] += 1

    def present(self, step):
        return [fault.kind for fault in self.faults if step in fault.steps and self.visits[step] <= fault.times]

    def on_step_end(self, args, state, control, **named):
        if Kind.flipped_bit in self.present(state.global_step):
            _, parameter = next(iter(self.trainer.engine.whole_parameters()))
            parameter.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 21)


class _Witness(TrainerCallback):
    """Compares, bit by bit, what no skipped step may move, and what a rollback must bring back."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.before = {}

    def on_step_begin(self, args, state, control, **named):
        done, now = state.global_step, self._look()
        last = state.log_history[-1] if state.log_history else {}
        if last.get("skipped"):
            assert last["step"] == done
            assert_same(self.before[done - 1], now | {"random": self.before[done - 1]["random"]}, f"skipped {done}")
        if done in self.before:
            assert_same(self.before[done], now, f"back at {done}")
            self.before = {}
        self.before[done] = now

    def _look(self):
        trainer = self.trainer
        pieces = {f"{p.name}/{p.key}/{p.start}": p.view.detach().clone() for p in trainer.engine.pieces()}
        rates = [group["lr"] for group in trainer.lr_scheduler.optimizer.param_groups]
        schedule = torch.tensor([trainer.lr_scheduler.last_epoch, *rates], dtype=torch.float64)
        return pieces | {"schedule": schedule, "random": torch.get_rng_state()}


def assert_same(before, after, what):
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), f"{what}: {name}"


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _run(config, faults):
    messages = _Messages()
    build, compute_loss = builder.Run.build_trainer, transformers.Trainer.compute_loss

    def build_with_faults(run):
        build(run)
        trainer = run.trainer
        trainer.saboteur = _Saboteur(faults, trainer)
        trainer.add_callback(trainer.saboteur)
        trainer.add_callback(_Witness(trainer))
        logging.getLogger("hfdist").addHandler(messages)

    def compute_loss_with_faults(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        for kind in self.saboteur.present(self.state.global_step + 1):
            loss = loss if kind is Kind.flipped_bit else _break_loss(kind, loss)
        return loss

    builder.Run.build_trainer, transformers.Trainer.compute_loss = build_with_faults, compute_loss_with_faults
    main.__wrapped__(config)
    return messages.texts


def pretrain_with(faults: Sequence[Fault], folder: Path, num_processes: int, *overrides: str) -> list[str]:
    """Run the recipe, and give rank 0's warnings."""
    config = compose_config([*SMALL, f"run.dir={folder}", *overrides])
    return run_ranks(_run, num_processes, config, faults, group=num_processes > 1)[0]
