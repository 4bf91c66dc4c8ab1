"""Between the arguments of a Trainer's constructor and the constructor: arguments are checked, the engine is built."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedType
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed
from transformers.training_args import OptimizerNames

from hfdist.config.train import Precision
from hfdist.errors import ConfigError, first_line
from hfdist.models.adapter import check_adapted, compute_by_factors
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.names.hub_names import find_hub_names
from hfdist.models.names.weight_names import read_names
from hfdist.models.routers import leave_out_router_loss
from hfdist.open_files import raise_limit
from hfdist.strategies.base import Engine, Strategy
from hfdist.strategies.select import strategy_by_name
from hfdist.topology import Topology
from hfdist.trainer.checkpointing.model_files import check_adapter_names, has_adapter
from hfdist.trainer.hooks import OURS, check_hooks, owner_of
from hfdist.trainer.optimizers import OwnOptimizer
from hfdist.trainer.row_check import check_is_dataset, check_rows
from hfdist.trainer.step.lean_optimizer import prepare_optimizer
from hfdist.trainer.step.sharded_dataloader import prepare_for_data_ranks
from hfdist.trainer.trl_trainers import (
    Arguments,
    check_trl_arguments,
    sums_over_targets,
    trains_causal_lm,
    with_adapter,
)

_READERS = ("__init__", "get_train_dataloader", "training_step", "compute_loss")
"""Methods of a Trainer's class that may read other rows than the original would."""
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


def find_strategy(strategy: object, arguments: Arguments) -> tuple[Strategy, Arguments]:
    """Give the strategy, or make it by its name, with the arguments that fit it; ConfigError: there is none."""
    where = "Trainer(strategy)"
    if not isinstance(strategy, Strategy | str):
        allowed, hint = 'hfdist.make_strategy(...), the name of a preset such as "fsdp2", None', 'strategy="fsdp2"'
        if isinstance(strategy, dict) and strategy:
            name = [repr(strategy["name"])] if "name" in strategy else []
            given = {"global_batch_size": 8} | {key: value for key, value in strategy.items() if key != "name"}
            hint = f"hfdist.make_strategy({', '.join([*name, *(f'{k}={v!r}' for k, v in given.items())])})"
        raise ConfigError("this is no strategy", where=where, found=repr(strategy), allowed=allowed, hint=hint)
    args = arguments.get("args")
    _check_is_arguments(args)
    if isinstance(strategy, Strategy):
        return strategy, arguments
    if args is None:
        what, hint = "a strategy by its name takes the sizes of the training arguments", "args=TrainingArguments(...)"
        raise ConfigError(what, where="args", found="None", hint=hint)
    made = strategy_by_name(strategy, args)
    return made, arguments | {"args": dataclasses.replace(args, **made.training_arguments())}


def _check_is_arguments(args: object) -> None:
    """Raise a ConfigError on what is neither TrainingArguments nor None."""
    if args is not None and not isinstance(args, TrainingArguments):
        given = "**values" if isinstance(args, Mapping) else '"out", ...'
        what, hint = "these are no TrainingArguments", f"args=TrainingArguments({given})"
        raise ConfigError(what, where="args", found=type(args).__name__, allowed="TrainingArguments", hint=hint)


def build_engine(kind: type, strategy: Strategy, arguments: Arguments) -> tuple[Engine, Arguments]:
    """Check what a Trainer is made with, and build the engine of its model. A collective.

    `kind` is the class of the trainer. `arguments` are all those of the class after the mixin, by name; they come back
    with the engine's model. A ConfigError says what does not go with the layout.
    """
    _check_arguments(arguments.get("args"), strategy)
    check_hooks(kind, strategy.topology)
    if strategy.topology.pipeline > 1 and not sums_over_targets(kind):
        raise ConfigError(
            "a pipeline ends the model's forward on all stages but the last, so what this class does after it may "
            "wait for the other ranks for ever",
            where=f"{kind.__name__}.compute_loss",
            found=f"that of {owner_of(kind, 'compute_loss').__name__}",
            hint="compute_loss_func=..., or a strategy without a pipeline, such as zero3",
        )
    if strategy.topology.context > 1:
        _check_loss_of_parts(kind, arguments)
    if strategy.topology.tensor > 1 and not sums_over_targets(kind):
        raise ConfigError(
            "this class gathers what all ranks have computed, and the ranks of a tensor group compute the same",
            where=f"{kind.__name__}.compute_loss",
            found=f"that of {owner_of(kind, 'compute_loss').__name__}",
            hint="compute_loss_func=..., or strategy.tensor=1 with strategy=fsdp2",
        )
    # A recipe has done both already; from Python nobody else would.
    raise_limit()
    strategy.start()
    arguments = arguments | _whole_model(kind, arguments, strategy)
    if all(owner_of(kind, name) is transformers.Trainer for name in _READERS):
        collates_itself = arguments.get("data_collator") is not None
        check_is_dataset(arguments.get("eval_dataset"), "eval_dataset")
        check_rows(arguments.get("train_dataset"), arguments["model"], collates_itself=collates_itself)
    check_trl_arguments(kind, arguments, strategy)
    arguments = with_adapter(arguments, kind, strategy)
    _check_half_weights(arguments["model"], arguments.get("args"))
    if getattr(arguments["model"], "peft_config", None):
        # The same for recipes, `peft_config`, and a model that brings its adapter.
        check_adapted(arguments["model"], strategy, where="peft_config")
        check_adapter_names(arguments["model"])
        compute_by_factors(arguments["model"])
    optimizer, _ = arguments.get("optimizers") or (None, None)
    own = None if optimizer is None else OwnOptimizer(optimizer, arguments["model"])
    engine = distribute(kind, strategy, arguments["model"])
    if not engine.reduces_gradients:
        _check_count(arguments.get("args"), strategy.topology)
    if own is not None:
        own.move_to(engine.model)
    return engine, arguments | {"model": engine.model}


def distribute(kind: type, strategy: Strategy, model: nn.Module) -> Engine:
    """Build the engine of a whole model that `kind` trains."""
    if sums_over_targets(kind):
        leave_out_router_loss(model)
    if not has_adapter(model):
        # While it is whole.
        find_hub_names(model)
    return strategy.build(model)


def _check_arguments(args: Any, strategy: Strategy) -> None:
    """Compare TrainingArguments with the layout's numbers, which the original class reads there."""
    for name, value in strategy.training_arguments().items():
        if getattr(args, name, None) != value:
            what = "the training arguments were not made for this strategy"
            hint = "TrainingArguments(..., **strategy.training_arguments())"
            if name == "deepspeed" and getattr(args, name, None):
                hint += "; a DeepSpeed config of your own goes to hfdist.make_strategy(..., deepspeed=FILE)"
            raise ConfigError(what, where=f"args.{name}", found=getattr(args, name, None), hint=hint)
    for name, value in strategy.agreed_arguments().items():
        if getattr(args, name) != value:
            what = "the strategy was made for another value, which DeepSpeed works with"
            hint = (
                "the same precision and max_grad_norm for hfdist.make_strategy and for TrainingArguments "
                "(those of TRL are bf16=True by default)"
            )
            raise ConfigError(what, where=f"args.{name}", found=getattr(args, name), allowed=str(value), hint=hint)
    asked = strategy.asked_precision
    if asked is not None and (args.bf16, args.fp16) != (asked is Precision.bf16, asked is Precision.fp16):
        what, found = "the strategy was made for another precision", f"bf16={args.bf16}, fp16={args.fp16}"
        hint = "the same precision for both, or hfdist.make_strategy without `precision`"
        raise ConfigError(what, where="args", found=found, allowed=f"those of {asked.value}", hint=hint)
    for name, (reason, hint) in _REFUSED.items():
        if getattr(args, name):
            raise ConfigError(reason, where=f"args.{name}", found="True", allowed="False", hint=hint)
    if strategy.topology.context > 1 and not args.average_tokens_across_devices:
        what = "the ranks that share sequences have a part of the loss each, which this would divide once more"
        where, hint = "args.average_tokens_across_devices", "TrainingArguments(average_tokens_across_devices=True)"
        raise ConfigError(what, where=where, found="False", allowed="True", hint=hint)
    if args.optim in _IN_BACKWARD:
        what, hint = "it steps within the backward of accelerate, which the strategy runs itself", "optim='adamw_torch'"
        raise ConfigError(what, where="args.optim", found=str(args.optim.value), hint=hint)
    if args.accelerator_config.split_batches:
        what = "it divides the batch of each rank once more, and the strategy has planned the batch"
        raise ConfigError(what, where="args.accelerator_config.split_batches", found="True", allowed="False")
    shared = args.parallelism_config
    if shared is not None and (shared.cp_enabled or shared.sp_enabled):
        what = "accelerate would share out sequences, of which each data rank reads others"
        found, hint = f"cp_size={shared.cp_size}, sp_size={shared.sp_size}", "make_strategy(..., context=N)"
        raise ConfigError(what, where="args.parallelism_config", found=found, allowed="1", hint=hint)
    if args.train_sampling_strategy == "batch_rebalance" and strategy.topology.data < strategy.topology.world_size:
        what = "it deals rows to all processes, and here several of them must read the same rows"
        where, hint = "args.train_sampling_strategy", "group_by_length, or a strategy such as zero3 or fsdp2 alone"
        raise ConfigError(what, where=where, found="batch_rebalance", hint=hint)


def _check_count(args: TrainingArguments | None, topology: Topology) -> None:
    """Refuse arguments that count other processes than there are, where accelerate is to reduce the gradients."""
    counted = getattr(args, "world_size", None)
    if counted is not None and counted != topology.world_size:
        what, hint = "each process would train alone", "TrainingArguments(use_cpu=True) where there are no GPUs"
        found = f"TrainingArguments count {counted}, the launcher has started {topology.world_size}"
        raise ConfigError(what, where="args", found=found, allowed="all processes", hint=hint)


def _check_half_weights(model: nn.Module, args: Any) -> None:
    """Refuse weights of float16 that are to be trained with fp16: torch's GradScaler scales gradients of float32 alone.

    DeepSpeed scales the loss itself, and keeps weights of float32 beside those of float16.
    """
    if not getattr(args, "fp16", False) or args.deepspeed:
        return
    if any(one.requires_grad and one.dtype == torch.float16 for one in model.parameters()):
        what, hint = "fp16=True trains weights of float32", 'from_pretrained(..., dtype="float32"), or bf16=True'
        raise ConfigError(what, where="model", found="weights of float16", allowed="float32", hint=hint)


def _check_loss_of_parts(kind: type, arguments: Arguments) -> None:
    """Refuse what must see whole sequences beside the model: each rank of a context group has a part."""
    args = arguments.get("args")
    if owner_of(kind, "compute_loss") is not transformers.Trainer:
        where, found = f"{kind.__name__}.compute_loss", f"that of {owner_of(kind, 'compute_loss').__name__}"
    else:
        values = {"compute_loss_func": arguments.get("compute_loss_func")}
        names = ("label_smoothing_factor", "neftune_noise_alpha")
        values |= {f"args.{name}": getattr(args, name, None) for name in names}
        given = {name: value for name, value in values.items() if value}
        if not given:
            return
        where, value = next(iter(given.items()))
        found = getattr(value, "__name__", value)
    what = "ranks that share sequences compute the loss of the model itself only: this one may look at whole sequences"
    raise ConfigError(what, where=where, found=found, hint="without it, or strategy.context=1")


def check_has_logits(engine: Engine, asker: str) -> None:
    """Raise a ConfigError where the original cannot gather logits: no rank has them whole, or several have the same.

    `asker` names what needs them.
    """
    hint = "evaluate() gives the loss; or save_model(folder), and predict with the folder's model"
    if not engine.runs_whole_model:
        what = f"{asker} needs the logits of whole sequences, and each rank has a part of them"
        raise ConfigError(what, where="strategy.pipeline, strategy.context", hint=hint)
    if engine.loss_group is not None:
        what = f"{asker} gathers logits of all ranks, and those of a tensor group have the same"
        raise ConfigError(what, where="strategy.tensor", hint=hint)


def arguments_by_name(kind: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Name the positional arguments of the class after the mixin: `args` comes second in most, but not in all.

    A ConfigError says that its constructor only passes on what it is given.
    """
    classes = kind.__mro__
    first_own = next(place for place, owner in enumerate(classes) if owner.__module__ in OURS)
    for owner in classes[first_own:]:
        if owner.__module__ in OURS or "__init__" not in vars(owner):
            continue
        signature = inspect.signature(vars(owner)["__init__"])
        own = [p for p in list(signature.parameters.values())[1:] if p.kind is not Parameter.VAR_KEYWORD]
        if all(parameter.kind is Parameter.VAR_POSITIONAL for parameter in own):
            continue
        try:
            bound = signature.bind(None, *args, **kwargs)
        except TypeError as error:
            hint = "processing_class=TOKENIZER" if "'tokenizer'" in str(error) else None
            where, allowed = f"{kind.__name__}(...)", ", ".join(parameter.name for parameter in own)
            raise ConfigError(first_line(error), where=where, allowed=allowed, hint=hint) from error
        arguments = dict(list(bound.arguments.items())[1:])
        for parameter in signature.parameters.values():
            if parameter.kind is Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
            elif parameter.kind is Parameter.VAR_POSITIONAL and arguments.pop(parameter.name, ()):
                break
        else:
            return arguments
        break
    what, found = "it cannot be told which of these arguments is the model", f"{len(args)} arguments without a name"
    raise ConfigError(what, where=f"{kind.__name__}(...)", found=found, hint="model=..., args=..., and so on")


def _whole_model(kind: type, arguments: Arguments, strategy: Strategy) -> dict[str, object]:
    """The model itself, that of `model_init`, or the one of this name where a name can only mean a causal model."""
    model, model_init = arguments.get("model"), arguments.get("model_init")
    if model is None and model_init is not None:
        # As in the original, which gives a trial of a search, or None, to a function that takes one.
        set_seed(arguments["args"].seed)
        return {"model": model_init(*[None] * len(inspect.signature(model_init).parameters)), "model_init": None}
    if isinstance(model, str) and trains_causal_lm(kind):
        fields: dict[str, Any] = {"dtype": torch.float32}
        fields |= getattr(arguments["args"], "model_init_kwargs", None) or {}
        # A .bin file is a pickle, which can run code; and where the model goes is the strategy's business.
        fields |= {"use_safetensors": True, "device_map": None}
        with strategy.without_partitioning(arguments["args"]):
            names = read_names(AutoModelForCausalLM, model, where="model", **fields)
        names.check(where="model", name=model, hint="the model itself in place of its name, if it is meant to be so")
        with reading_from_hub("model", model):
            return {"model": AutoModelForCausalLM.from_pretrained(model, **fields)}
    if not isinstance(model, nn.Module):
        what = "a strategy distributes a model that exists"
        hint = "AutoModelForCausalLM.from_pretrained(NAME, dtype='float32'), after the training arguments"
        raise ConfigError(what, where="model", found=repr(model), allowed="a model, on the CPU and whole", hint=hint)
    compiled = model._modules.get("_orig_mod")
    if compiled is not None or isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        what, hint = "a strategy distributes a plain model", "the model that this one wraps"
        hint = (
            "TrainingArguments(torch_compile=True), and the model as it was before torch.compile" if compiled else hint
        )
        raise ConfigError(what, where="model", found=type(model).__name__, hint=hint)
    return {"model": model}


def adapt_accelerator(accelerator: Accelerator, topology: Topology, uses_all_parameters: Callable[[], bool]) -> None:
    """Change what a new accelerator does otherwise than a strategy wants.

    `uses_all_parameters` says whether each step's loss is known to need all parameters, where the user leaves it open.
    """
    # Else copies of all weights that a forward has gathered stay until it ends, also where blocks are computed again.
    accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    handler = accelerator.ddp_handler
    if handler is not None:
        if handler.find_unused_parameters and uses_all_parameters():
            # Else DDP walks through the graph at each forward, and says itself that there is nothing to find.
            handler.find_unused_parameters = False
        # Else DDP holds gradients twice, as they are and in its buckets, and copies them to and fro.
        handler.gradient_as_bucket_view = True
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # The Trainer accumulates by itself and tells accelerate of one step, of which DeepSpeed's config has the truth.
        accelerator.gradient_accumulation_steps = accelerator.deepspeed_plugin.get_value("gradient_accumulation_steps")
    elif accelerator.mixed_precision == "fp16":
        # On a CPU it drops fp16 without a word: give it what a GPU gets.
        accelerator.native_amp = True
        accelerator.scaler = SyncedLossScaler(accelerator.device.type)
    accelerator.prepare_optimizer = partial(prepare_optimizer, accelerator)
    if topology.data < accelerator.num_processes:
        # It shares batches out to all processes, but ranks of one model replica must read the same.
        accelerator.prepare_data_loader = partial(
            prepare_for_data_ranks, accelerator, num_ranks=topology.data, rank=topology.data_rank
        )


class SyncedLossScaler(torch.amp.GradScaler):
    """torch's, but all ranks skip a step whose gradients overflow on any: each may hold another part of the model.

    Every rank must unscale in every step. FSDP's own does so, too, but its flag has a shape that fused Adam refuses.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and note whether any rank's have overflowed."""
        super().unscale_(optimizer)
        # Private, but also where optimizers with a scale of their own look.
        flags: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
        if not flags:
            # A rank whose parameters are all frozen still takes part.
            assert self._scale is not None
            flags[self._scale.device] = torch.zeros((), device=self._scale.device)
        if dist.is_initialized():
            for flag in flags.values():
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
