"""Checks of the arguments of a Trainer's constructor against the strategy, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from torch import nn
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hfdist.config.train import Precision
from hfdist.errors import ConfigError
from hfdist.strategies.base import Strategy
from hfdist.topology import Topology
from hfdist.trainer.hooks import owner_of
from hfdist.trainer.trl_trainers import Arguments, sums_over_targets

_REFUSED = {
    "save_only_model": (
        "a checkpoint holds all that a run goes on from, in each layout",
        "each checkpoint is a Hub model folder, too; save_model(folder) writes the model alone",
    ),
    "auto_find_batch_size": (
        "the strategy has planned the batch, and another size would be another training",
        "a smaller micro_batch_size for hfdist.make_strategy: the global batch stays",
    ),
}
"""Arguments that a strategy refuses: why, and what to do instead."""
_IN_BACKWARD = (OptimizerNames.LOMO, OptimizerNames.ADALOMO)
"""Optimizers that take their step while gradients are computed, in a backward of accelerate's."""
_WITHOUT_OTHER_LOSSES = {
    "pipeline": (
        "a pipeline ends the model's forward on all stages but the last, so what this class does after it may "
        "wait for the other ranks for ever",
        "compute_loss_func=..., or a strategy without a pipeline, such as zero3",
    ),
    "tensor": (
        "this class gathers what all ranks have computed, and the ranks of a tensor group compute the same",
        "compute_loss_func=..., or strategy.tensor=1 with strategy=fsdp2",
    ),
}
"""Axes that a class with a `compute_loss` of its own does not go with: why, and what to do instead."""


def check_is_arguments(args: object) -> None:
    """Raise a ConfigError on what is neither TrainingArguments nor None."""
    if args is not None and not isinstance(args, TrainingArguments):
        given = "**values" if isinstance(args, Mapping) else '"out", ...'
        what, hint = "these are no TrainingArguments", f"args=TrainingArguments({given})"
        raise ConfigError(what, where="args", found=type(args).__name__, allowed="TrainingArguments", hint=hint)


def check_arguments(args: TrainingArguments | None, strategy: Strategy) -> TrainingArguments:
    """Give TrainingArguments back if they say what the layout does; ConfigError: they say something else."""
    _check_made_for(args, strategy)
    assert args is not None  # a strategy has some arguments
    _check_agrees(args, strategy)
    _check_precision(args, strategy)
    for name, (reason, hint) in _REFUSED.items():
        if getattr(args, name):
            raise ConfigError(reason, where=f"args.{name}", found="True", allowed="False", hint=hint)
    if args.optim in _IN_BACKWARD:
        what, hint = "it steps within the backward of accelerate, which the strategy runs itself", "optim='adamw_torch'"
        raise ConfigError(what, where="args.optim", found=OptimizerNames(args.optim).value, hint=hint)
    _check_sharing(args, strategy.topology)
    return args


def _check_made_for(args: TrainingArguments | None, strategy: Strategy) -> None:
    """Refuse arguments, or none, without the values of the strategy."""
    for name, value in strategy.training_arguments().items():
        found = getattr(args, name, None)
        if found != value:
            what = "the training arguments were not made for this strategy"
            hint = "TrainingArguments(..., **strategy.training_arguments())"
            if name == "deepspeed" and found:
                hint += "; a DeepSpeed config of your own goes to hfdist.make_strategy(..., deepspeed=FILE)"
            raise ConfigError(what, where=f"args.{name}", found=found, hint=hint)


def _check_agrees(args: TrainingArguments, strategy: Strategy) -> None:
    """Refuse values that DeepSpeed was given otherwise when the strategy was made."""
    for name, value in strategy.agreed_arguments().items():
        if getattr(args, name) != value:
            what = "the strategy was made for another value, which DeepSpeed works with"
            hint = (
                "the same precision and max_grad_norm for hfdist.make_strategy and for TrainingArguments "
                "(those of TRL are bf16=True by default)"
            )
            raise ConfigError(what, where=f"args.{name}", found=getattr(args, name), allowed=str(value), hint=hint)


def _check_precision(args: TrainingArguments, strategy: Strategy) -> None:
    """Refuse another precision than the one that the strategy was asked for."""
    asked = strategy.asked_precision
    if asked is None:
        return
    if args.bf16 != (asked is Precision.bf16) or args.fp16 != (asked is Precision.fp16):
        what, found = "the strategy was made for another precision", f"bf16={args.bf16}, fp16={args.fp16}"
        hint = "the same precision for both, or hfdist.make_strategy without `precision`"
        raise ConfigError(what, where="args", found=found, allowed=f"those of {asked.value}", hint=hint)


def _check_sharing(args: TrainingArguments, topology: Topology) -> None:
    """Refuse arguments by which accelerate or the Trainer would share out what the layout has shared out."""
    if topology.context > 1 and not args.average_tokens_across_devices:
        what = "the ranks that share sequences have a part of the loss each, which this would divide once more"
        where, hint = "args.average_tokens_across_devices", "TrainingArguments(average_tokens_across_devices=True)"
        raise ConfigError(what, where=where, found="False", allowed="True", hint=hint)
    if getattr(args.accelerator_config, "split_batches", False):
        what = "it divides the batch of each rank once more, and the strategy has planned the batch"
        raise ConfigError(what, where="args.accelerator_config.split_batches", found="True", allowed="False")
    shared = args.parallelism_config
    if shared is not None and (shared.cp_enabled or shared.sp_enabled):
        what = "accelerate would share out sequences, of which each data rank reads others"
        found, hint = f"cp_size={shared.cp_size}, sp_size={shared.sp_size}", "make_strategy(..., context=N)"
        raise ConfigError(what, where="args.parallelism_config", found=found, allowed="1", hint=hint)
    if args.train_sampling_strategy == "batch_rebalance" and topology.data < topology.world_size:
        what = "it deals rows to all processes, and here several of them must read the same rows"
        where, hint = "args.train_sampling_strategy", "group_by_length, or a strategy such as zero3 or fsdp2 alone"
        raise ConfigError(what, where=where, found="batch_rebalance", hint=hint)


def check_class_loss(kind: type, arguments: Arguments, topology: Topology) -> None:
    """Refuse a loss that sees other outputs in this layout than those of the whole model.

    Args:
        kind: the class of the trainer.
        arguments: the arguments of its constructor, by name.
        topology: the ranks of the layout.
    """
    owner = owner_of(kind, "compute_loss")
    for axis, (what, hint) in _WITHOUT_OTHER_LOSSES.items():
        if getattr(topology, axis) > 1 and not sums_over_targets(kind):
            where, found = f"{kind.__name__}.compute_loss", f"that of {owner.__name__}"
            raise ConfigError(what, where=where, found=found, hint=hint)
    if topology.context > 1:
        _check_loss_of_parts(kind, arguments)


def _check_loss_of_parts(kind: type, arguments: Arguments) -> None:
    """Refuse what must see whole sequences beside the model: each rank of a context group has a part."""
    what = "ranks that share sequences compute the loss of the model itself only: this one may look at whole sequences"
    hint = "without it, or strategy.context=1"
    owner = owner_of(kind, "compute_loss")
    if owner is not transformers.Trainer:
        raise ConfigError(what, where=f"{kind.__name__}.compute_loss", found=f"that of {owner.__name__}", hint=hint)
    values = {"compute_loss_func": arguments.get("compute_loss_func")}
    for name in ("label_smoothing_factor", "neftune_noise_alpha"):
        values[f"args.{name}"] = getattr(arguments["args"], name)
    for where, value in values.items():
        if value:
            raise ConfigError(what, where=where, found=getattr(value, "__name__", value), hint=hint)


def check_count(args: TrainingArguments, topology: Topology) -> None:
    """Refuse arguments that count other processes than there are, where accelerate is to reduce the gradients."""
    counted = args.world_size
    if counted != topology.world_size:
        what, hint = "each process would train alone", "TrainingArguments(use_cpu=True) where there are no GPUs"
        found = f"TrainingArguments count {counted}, the launcher has started {topology.world_size}"
        raise ConfigError(what, where="args", found=found, allowed="all processes", hint=hint)


def check_half_weights(model: nn.Module, args: TrainingArguments) -> None:
    """Refuse weights of float16 that are to be trained with fp16: torch's GradScaler scales gradients of float32 alone.

    DeepSpeed scales the loss itself, and keeps weights of float32 beside those of float16.
    """
    if not args.fp16 or args.deepspeed:
        return
    if any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        what, hint = "fp16=True trains weights of float32", 'from_pretrained(..., dtype="float32"), or bf16=True'
        raise ConfigError(what, where="model", found="weights of float16", allowed="float32", hint=hint)
