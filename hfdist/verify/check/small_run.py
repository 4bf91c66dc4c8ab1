"""A small model of the class, trained for two steps on forked processes of this machine's CPU, in a layout or whole."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, default_data_collator

from hfdist.apart import Limits, confine
from hfdist.config.checks.preflight import plan_run
from hfdist.config.run import RunConfig
from hfdist.config.task import Head
from hfdist.errors import ConfigError, HfdistError, first_line
from hfdist.models import TrainableParameters, build_model
from hfdist.models.loss import choose_loss
from hfdist.models.probing import loss_of_states
from hfdist.run.training_arguments import build_arguments
from hfdist.strategies.engine import Batch
from hfdist.strategies.select import device_type_here, select_strategy
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.run_options import RunOptions
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.trainer import Trainer
from hfdist.verify.check.questions import NUM_SEQUENCES, NUM_STEPS

NUM_TOKENS, MOST_TOKENS = 32, 256
"""Tokens of a sequence, and size of the vocabulary."""
_SECONDS = 120.0
"""Most seconds of a small run; half of a machine's cores may be busy."""
_LIMITS = Limits(cpu_seconds=60, memory_bytes=8 * 2**30)
_WHAT = "a small model of the class does not train so"


class Step(NamedTuple):
    """What an optimizer step leaves to compare."""

    loss: float
    gradient_norm: float


class _States(Objective):
    """A loss for models that give no loss of next tokens: of states, scores or logits, a sum over sequences."""

    def __init__(self, *, has_decoder: bool) -> None:
        self._has_decoder = has_decoder

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the sequences."""
        return torch.tensor(len(batch["input_ids"]))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum over the sequences, of which a micro batch has one."""
        ids = batch["input_ids"]
        read_by_decoder = {"decoder_input_ids": ids} if self._has_decoder else {}
        return loss_of_states(model(input_ids=ids, **read_by_decoder)[0])


def train_small(config: RunConfig, architecture: PreTrainedConfig, processes: int) -> list[Step]:
    """Train on so many forked processes.

    Args:
        config: from a `Question`; its model is on this machine.
        architecture: of the small model.
        processes: number of ranks.

    Raises:
        HfdistError: why it does not train; within limits of time and memory.
    """
    try:
        found: list[list[Step]] = run_ranks(
            _be_rank, processes, config, architecture, timeout_seconds=_SECONDS, group=processes > 1
        )
    except RankFailed as failed:
        if isinstance(failed.__cause__, HfdistError):
            raise failed.__cause__ from None
        raise HfdistError(_WHAT, found=first_line(failed)) from failed
    return found[0]


def _be_rank(config: RunConfig, architecture: PreTrainedConfig) -> list[Step]:
    confine(_LIMITS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _train(replace(config, run=replace(config.run, dir=folder)), architecture)
    except HfdistError:
        raise
    except Exception as error:  # whatever a model or a library raises
        raise ConfigError(_WHAT, found=f"{type(error).__name__}: {first_line(error)}") from error


def _train(config: RunConfig, architecture: PreTrainedConfig) -> list[Step]:
    topology, batch = plan_run(config)
    strategy = select_strategy(
        config.strategy, config.train, topology=topology, batch=batch, device_type=device_type_here()
    )
    arguments = build_arguments(config, strategy, max_steps=NUM_STEPS)
    model = build_model(
        config.model,
        architecture,
        seed=config.train.seed,
        layout=strategy,
        trained=TrainableParameters.of(config),
        head=config.task.name.traits.head,
    )
    has_loss = config.task.name.traits.head is Head.tokens
    head = choose_loss(config, model, strategy) if has_loss else None
    objective = None if has_loss else _States(has_decoder=architecture.is_encoder_decoder)
    trainer = Trainer(
        model,
        arguments,
        strategy=strategy,
        train_dataset=_rows(),
        data_collator=default_data_collator,
        options=RunOptions(objective=objective, loss_head=head),
    )
    trainer.train()
    lines = (line for line in trainer.state.log_history if "grad_norm" in line)
    return [Step(line["loss"], line["grad_norm"]) for line in lines]


def _rows() -> list[dict[str, torch.Tensor]]:
    """Sequences for all steps, of each of which all tokens are targets."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(MOST_TOKENS // 2, (NUM_STEPS * NUM_SEQUENCES, NUM_TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]
