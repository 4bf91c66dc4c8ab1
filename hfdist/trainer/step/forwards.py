"""Forwards without gradients in the layout that trains: for evaluations, and for what objectives ask of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hfdist.errors import ConfigError
from hfdist.strategies.engine import Batch, Forward, Function
from hfdist.trainer.training import Training


@contextmanager
def evaluating(training: Training, *, are_training: bool = False) -> Iterator[Forward]:
    """Switch the model from training to evaluation, and give what runs forwards; the clock stops.

    Args:
        training: the parts of a Trainer that has an engine.
        are_training: whether the forwards are part of a training step. Then the clock goes on, and the model is in
            training again at the end.
    """
    trainer, engine, args = training.trainer, training.engine, training.args
    is_before_deepspeed = trainer.is_deepspeed_enabled and trainer.model_wrapped is trainer.model
    if is_before_deepspeed:
        if any(tuple(p.shape) != engine.whole_shape(p) for p in training.model.parameters()):
            raise ConfigError(
                "evaluate() before train() is not possible: each process has a part of every parameter, "
                "and DeepSpeed puts them together once it has the optimizer",
                hint="TrainingArguments(eval_on_start=True), or another strategy such as zero2",
            )
        # DeepSpeed would move it.
        model = training.model.to(args.device)
    else:
        # DDP's wrapper only matters for backward, and would make ranks wait for each other.
        model = trainer.model_wrapped if trainer.is_deepspeed_enabled else training.model

    def forward(batch: Batch, function: Function, *, as_whole: bool = False) -> list[Any]:
        def call(module: nn.Module, part: Batch) -> object:
            # What training computes in; before DeepSpeed rounds the weights, the same as in layouts without it.
            dtype = torch.float16 if args.fp16 else torch.bfloat16
            early = torch.autocast(args.device.type, dtype, enabled=args.fp16 or args.bf16)
            with early if is_before_deepspeed else training.accelerator.autocast():
                return function(module, trainer._prepare_inputs(part))

        return engine.forward(batch, call, training.hooks(model), as_whole=as_whole)

    # It stays so until the next step, as in the original: what logs the metrics may read it off the model.
    model.eval()
    with nullcontext() if are_training else training.paused():
        yield forward
    if are_training:
        training.model.train()
