"""A small model of the class, trained for two steps on forked processes of this machine's CPU, in a layout or whole."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, default_data_collator

from hfdist.apart import Limits, confine
from hfdist.config.batch import IGNORED
from hfdist.config.checks.preflight import plan_run
from hfdist.config.run import RunConfig
from hfdist.config.task import Head
from hfdist.errors import ConfigError, HfdistError, first_line, named_line
from hfdist.models import TrainableParameters, build_model
from hfdist.models.loss import choose_loss
from hfdist.models.probing import loss_of_states
from hfdist.models.target_loss import fill_special_ids
from hfdist.run.training_arguments import build_arguments
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch
from hfdist.strategies.select import device_type_here, select_strategy
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.run_options import RunOptions
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.trainer import Trainer
from hfdist.tune.seq2seq import SequenceToSequence
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
    """A loss for models that give no loss of tokens: of states, scores or logits, a sum over sequences."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the sequences."""
        return torch.tensor(len(batch["input_ids"]))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum over the sequences, of which a micro batch has one."""
        return loss_of_states(model(input_ids=batch["input_ids"])[0])


def train_small(config: RunConfig, architecture: PreTrainedConfig, processes: int) -> list[Step]:
    """Train on so many forked processes.

    Args:
        config: the config of a `Question`, whose model is on this machine.
        architecture: the small model's config.
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
        raise ConfigError(_WHAT, found=named_line(error)) from error


def _train(config: RunConfig, architecture: PreTrainedConfig) -> list[Step]:
    topology, batch = plan_run(config)
    strategy = select_strategy(
        config.strategy, config.train, topology=topology, batch=batch, device_type=device_type_here()
    )
    arguments = build_arguments(config, strategy, max_steps=NUM_STEPS)
    head = config.task.name.traits.head
    if head is Head.targets:
        fill_special_ids(architecture, 0)
    model = build_model(
        config.model,
        architecture,
        seed=config.train.seed,
        layout=strategy,
        trained=TrainableParameters.of(config),
        head=head,
    )
    trainer = Trainer(
        model,
        arguments,
        strategy=strategy,
        train_dataset=_rows(head, architecture),
        data_collator=default_data_collator,
        options=_options(config, model, strategy),
    )
    trainer.train()
    lines = (line for line in trainer.state.log_history if "grad_norm" in line)
    return [Step(line["loss"], line["grad_norm"]) for line in lines]


def _options(config: RunConfig, model: PreTrainedModel, strategy: Strategy) -> RunOptions:
    match config.task.name.traits.head:
        case Head.tokens:
            return RunOptions(loss_head=choose_loss(config, model, strategy))
        case Head.targets:
            return RunOptions(objective=SequenceToSequence())
        case _:
            return RunOptions(objective=_States())


def _rows(head: Head, architecture: PreTrainedConfig) -> list[dict[str, torch.Tensor]]:
    """Sequences for all steps, of each of which all tokens are targets; of an encoder-decoder those of its half."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(MOST_TOKENS // 2, (NUM_STEPS * NUM_SEQUENCES, NUM_TOKENS), generator=generator)
    end = architecture.get_text_config().eos_token_id
    if head.gives_labels and isinstance(end, int):
        # Some classes take the state of this token for that of the text, and have one in each.
        rows[rows == end] = end + 1
        rows[:, -1] = end
    labels = rows.clone()
    if head is Head.targets:
        labels[:, : NUM_TOKENS // 2] = IGNORED
    return [{"input_ids": row, "labels": own} for row, own in zip(rows, labels, strict=True)]
