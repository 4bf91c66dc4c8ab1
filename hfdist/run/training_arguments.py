"""Makes transformers' TrainingArguments of a run's config: the only place that names their fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import TrainingArguments

from hfdist.config.batch import BatchPlan, num_warmup_steps
from hfdist.config.composition.unknown_keys import check_argument
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.run import RunConfig
from hfdist.config.task import Head
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError, PeerError, first_line, nearest
from hfdist.launch.gloo_interface import VARIABLE, choose_gloo_interface
from hfdist.optim.registry import name_for_arguments
from hfdist.optim.schedule import scheduler_of
from hfdist.run.process_group import start_group_under_torchrun
from hfdist.strategies.base import Strategy
from hfdist.strategies.deepspeed.startup import import_deepspeed
from hfdist.topology import read_launcher
from hfdist.watch.callback import is_broken_connection


def build_arguments(config: RunConfig, strategy: Strategy, *, max_steps: int) -> TrainingArguments:
    """Give the Trainer's arguments, which start the process group; then start the strategy.

    Raises:
        ConfigError: transformers refuses the arguments.
        PeerError: this rank cannot connect to the others.
    """
    fields = _generated(config, strategy.batch, max_steps) | strategy.training_arguments()
    of_user = config.train.arguments
    choose_gloo_interface()
    import_deepspeed()
    try:
        start_group_under_torchrun(backend=of_user.get("ddp_backend"), timeout_seconds=of_user.get("ddp_timeout"))
        arguments = TrainingArguments(**fields, **of_user)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            f"transformers refuses the arguments: {first_line(error)}",
            where="train.arguments, optimizer.* or train.*",
        ) from error
    except RuntimeError as error:
        if not is_broken_connection(error):
            raise
        what, hint = "this rank cannot connect to the others", f"the interface between the machines in {VARIABLE}"
        raise PeerError(what, where=f"rank {read_launcher().rank}", found=first_line(error), hint=hint) from error
    strategy.start()
    return arguments


def _generated(config: RunConfig, batch: BatchPlan, max_steps: int) -> dict[str, Any]:
    """Give the fields that hfdist sets itself, by name."""
    train = config.train
    return {
        "output_dir": config.run.dir,
        "run_name": config.run.name,
        "max_steps": max_steps,
        "per_device_train_batch_size": batch.micro_batch_size,
        "per_device_eval_batch_size": train.eval_micro_batch_size or batch.micro_batch_size,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "bf16": train.precision.is_bf16,
        "fp16": train.precision is Precision.fp16,
        "torch_compile": train.compile is Compile.model,
        # Other kinds of recomputation are set up on the model: they need functions, and these arguments are JSON.
        "activation_checkpointing": train.is_checkpointed_by_trainer,
        "eval_strategy": "no" if train.eval_every is None else "steps",
        "eval_steps": train.eval_every,
        "save_strategy": "no" if config.checkpoint.every is None else "steps",
        "save_steps": config.checkpoint.every or 1,
        "save_total_limit": config.checkpoint.keep,
        "logging_steps": config.report.log_every,
        # A loss that is not finite must be seen, not replaced by the average of the others.
        "logging_nan_inf_filter": False,
        # The run makes its trackers itself.
        "report_to": "none",
        # The bar is ours: it shows tokens/s.
        "disable_tqdm": True,
        "log_level": "warning",
        "log_level_replica": "error",
        "use_cpu": not torch.cuda.is_available(),
        # The stream seeks: nothing is read again to be thrown away.
        "ignore_data_skip": True,
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
        "ddp_find_unused_parameters": _finds_unused(config),
    } | _optimizer(config.optimizer, batch, max_steps)


def _finds_unused(config: RunConfig) -> bool | None:
    """Whether DDP looks for parameters that a step does not use; None: the Trainer tries it on a small model."""
    if config.data.images.used:
        # A rank whose rows have no image does not call what reads them.
        return True
    # Many models have a pooler, whose output embeddings do not use.
    return None if config.task.name.traits.head is Head.none else False


def _optimizer(optimizer: OptimizerConfig, batch: BatchPlan, max_steps: int) -> dict[str, object]:
    scheduler_type, scheduler_kwargs = scheduler_of(optimizer, max_steps)
    return {
        "optim": name_for_arguments(optimizer),
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "lr_scheduler_type": scheduler_type,
        "lr_scheduler_kwargs": scheduler_kwargs,
        "warmup_steps": num_warmup_steps(optimizer, tokens_per_step=batch.tokens_per_step, max_steps=max_steps),
    }


def check_further_arguments(config: RunConfig, batch: BatchPlan) -> None:
    """Raise a ConfigError on a name in `train.arguments` that is unknown, or that hfdist sets itself."""
    # Only the names count, so any number of steps will do.
    ours = _generated(config, batch, max_steps=1)
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    for name, value in config.train.arguments.items():
        key = f"train.arguments.{name}"
        check_argument(key, value)
        if name in ours:
            what, hint = "hfdist sets this argument itself", f"leave {key} out"
            raise ConfigError(what, where=key, found=value, hint=hint)
        if name not in known:
            what = "transformers' TrainingArguments has no such field"
            near = nearest(name, known, f"train.arguments.{{}}={value}")
            raise ConfigError(what, where=key, found=value, allowed="a field of TrainingArguments", hint=near)
