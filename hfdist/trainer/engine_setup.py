"""What happens between the arguments of a Trainer's constructor and the constructor itself: the engine is built."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, set_seed

from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.probing import uses_all_parameters
from hfdist.strategies.base import Engine, Strategy
from hfdist.topology import Topology
from hfdist.trainer.optimizers import OwnOptimizer
from hfdist.trainer.step.lean_step import prepare_optimizer
from hfdist.trainer.step.loss_scaler import SyncedLossScaler
from hfdist.trainer.step.sharded_dataloader import deal
from hfdist.trainer.trl_trainers import MIXIN, check_wishes, owner_of_loss, trains_causal_lm
from hfdist.trainer.validation import check_arguments, check_loss

_Parameter = inspect.Parameter


def adapt_accelerator(trainer: Any, topology: Topology) -> None:
    """Mend what accelerate does otherwise than a strategy wants.

    Args:
        trainer: that has just made its accelerator.
        topology: of this run.
    """
    accelerator, handler = trainer.accelerator, trainer.accelerator.ddp_handler
    if handler is not None:
        if handler.find_unused_parameters and _uses_all_parameters(trainer):
            # Else DDP walks through the graph at each forward, and says itself that there is nothing to find.
            handler.find_unused_parameters = False
        # Else DDP holds gradients twice, as they are and in its buckets, and copies them to and fro.
        handler.gradient_as_bucket_view = True
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # The Trainer accumulates by itself and tells accelerate of one step, of which DeepSpeed's config has the truth.
        accelerator.gradient_accumulation_steps = accelerator.deepspeed_plugin.get_value("gradient_accumulation_steps")
    if accelerator.mixed_precision == "fp16" and accelerator.distributed_type is not DistributedType.DEEPSPEED:
        # On a CPU it drops fp16 without a word: give it what a GPU gets.
        accelerator.native_amp = True
        accelerator.scaler = SyncedLossScaler(accelerator.device.type)
    accelerator.prepare_optimizer = partial(prepare_optimizer, accelerator)
    if topology.data_size < accelerator.num_processes:
        # It deals batches over all processes, but ranks of one model replica must read the same.
        accelerator.prepare_data_loader = partial(deal, accelerator, topology)


def _uses_all_parameters(trainer: Any) -> bool:
    """Whether it is known, where the arguments leave it open, that each step's loss needs all parameters."""
    is_ddp = trainer.accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    is_open = is_ddp and trainer.args.ddp_find_unused_parameters is None and not trainer.engine.reduces_gradients
    is_plain = isinstance(trainer.model, PreTrainedModel) and owner_of_loss(type(trainer)) is Trainer
    return is_open and is_plain and uses_all_parameters(trainer.model)


def build_engine(kind: type, strategy: Strategy, wishes: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    """Check what a Trainer is made with, and build the engine of its model. A collective.

    Args:
        kind: class of the trainer, with the mixin before the class that computes the loss.
        strategy: the layout.
        wishes: all arguments of the class after the mixin, by name.

    Returns:
        The engine, and the arguments with the engine's model in the place of the whole one.

    Raises:
        ConfigError: what this class is asked for does not go with the layout.
    """
    check_arguments(wishes.get("args"), strategy)
    check_loss(kind, strategy)
    # Once more where a recipe has done it: from Python nobody else would.
    strategy.start()
    wishes = wishes | _whole_model(kind, wishes)
    check_wishes(kind, wishes, strategy)
    optimizer, _ = wishes.get("optimizers") or (None, None)
    own = None if optimizer is None else OwnOptimizer(optimizer, wishes["model"])
    engine = strategy.build(wishes["model"])
    if own is not None:
        own.move_to(engine.model)
    return engine, wishes | {"model": engine.model}


def arguments_by_name(kind: type, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Name the positional arguments of the class after the mixin: `args` comes second in most, but not in all.

    Raises:
        TypeError: they do not fit that class, as Python says it.
        ConfigError: its constructor only hands on what it is given under names of its own.
    """
    classes = list(kind.__mro__)
    last_own = max(place for place, owner in enumerate(classes) if owner.__module__ == MIXIN)
    for owner in classes[last_own + 1 :]:
        if "__init__" not in vars(owner):
            continue
        signature = inspect.signature(vars(owner)["__init__"])
        own = [p for p in list(signature.parameters.values())[1:] if p.kind is not _Parameter.VAR_KEYWORD]
        if all(parameter.kind is _Parameter.VAR_POSITIONAL for parameter in own):
            continue
        bound = signature.bind(None, *given, **named)
        wishes = dict(list(bound.arguments.items())[1:])
        for parameter in signature.parameters.values():
            if parameter.kind is _Parameter.VAR_KEYWORD:
                wishes |= wishes.pop(parameter.name, {})
            elif parameter.kind is _Parameter.VAR_POSITIONAL and wishes.pop(parameter.name, ()):
                break
        else:
            return wishes
        break
    raise ConfigError(
        "it cannot be told which of these arguments is the model",
        where=f"{kind.__name__}(...)",
        found=f"{len(given)} arguments without a name",
        hint="model=..., args=..., and so on",
    )


def _whole_model(kind: type, wishes: dict[str, Any]) -> dict[str, Any]:
    """The model itself, that of `model_init`, or the one of this name where a name can only mean a causal model."""
    model, model_init = wishes.get("model"), wishes.get("model_init")
    if model is None and model_init is not None:
        # As in the original, which gives a trial of a search, or None, to a function that takes one.
        set_seed(wishes["args"].seed)
        return {"model": model_init(*[None] * len(inspect.signature(model_init).parameters)), "model_init": None}
    if isinstance(model, str) and trains_causal_lm(kind):
        fields: dict[str, Any] = {"dtype": torch.float32} | dict(
            getattr(wishes["args"], "model_init_kwargs", None) or {}
        )
        # A .bin file is a pickle, which can run code; and where the model goes is the strategy's business.
        fields |= {"use_safetensors": True, "device_map": None}
        with reading_from_hub("model", model):
            return {"model": AutoModelForCausalLM.from_pretrained(model, **fields)}
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "a strategy distributes a model that exists",
            where="model",
            found=repr(model),
            allowed="a model, on the CPU and whole",
            hint="AutoModelForCausalLM.from_pretrained(NAME, dtype='float32'), after the training arguments",
        )
    return {"model": model}
