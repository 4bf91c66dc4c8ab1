"""What happens between the arguments of a Trainer's constructor and the constructor itself: the engine is built."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoModelForCausalLM

from hfdist.errors import ConfigError
from hfdist.models.hub import reading_from_hub
from hfdist.strategies.base import Engine, Strategy
from hfdist.topology import Topology
from hfdist.trainer.dealing import deal
from hfdist.trainer.guards import check_arguments, check_loss
from hfdist.trainer.loss_scaler import AgreedLossScaler
from hfdist.trainer.optimizers import OwnOptimizer
from hfdist.trainer.step import prepare_optimizer
from hfdist.trainer.trl_trainers import MIXIN, check_wishes, trains_causal_lm

_Parameter = inspect.Parameter


def adapt_accelerator(accelerator: Any, topology: Topology) -> None:
    """Mend what accelerate does otherwise than a strategy wants.

    Args:
        accelerator: as the Trainer has just made it.
        topology: of this run.
    """
    if accelerator.ddp_handler is not None:
        # Else DDP holds gradients twice, as they are and in its buckets, and copies them to and fro.
        accelerator.ddp_handler.gradient_as_bucket_view = True
    if accelerator.mixed_precision == "fp16" and accelerator.distributed_type is not DistributedType.DEEPSPEED:
        # On a CPU it drops fp16 without a word: give it what a GPU gets.
        accelerator.native_amp = True
        accelerator.scaler = AgreedLossScaler(accelerator.device.type)
    accelerator.prepare_optimizer = partial(prepare_optimizer, accelerator)
    if topology.data_size < accelerator.num_processes:
        # It deals batches over all processes, but ranks of one model replica must read the same.
        accelerator.prepare_data_loader = partial(deal, accelerator, topology)


def build_engine(
    kind: type, strategy: Strategy, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Engine, dict[str, Any]]:
    """Check what a Trainer is made with, and build the engine of its model. A collective.

    Args:
        kind: class of the trainer, with the mixin before the class that computes the loss.
        strategy: the layout.
        given: positional arguments of the class after the mixin.
        named: the others.

    Returns:
        The engine, and all arguments by name, with the engine's model in the place of the whole one.

    Raises:
        ConfigError: what this class is asked for does not go with the layout.
    """
    wishes = arguments_by_name(kind, given, named)
    check_arguments(wishes.get("args"), strategy)
    check_loss(kind, strategy)
    # Once more where a recipe has done it: from Python nobody else would.
    strategy.start()
    wishes["model"] = _whole_model(kind, wishes)
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


def _whole_model(kind: type, wishes: dict[str, Any]) -> nn.Module:
    """The model itself, or the one of this name where a name can only mean a causal language model."""
    model = wishes.get("model")
    if isinstance(model, str) and trains_causal_lm(kind):
        fields: dict[str, Any] = {"dtype": torch.float32} | dict(
            getattr(wishes["args"], "model_init_kwargs", None) or {}
        )
        # A .bin file is a pickle, which can run code; and where the model goes is the strategy's business.
        fields |= {"use_safetensors": True, "device_map": None}
        with reading_from_hub("model", model):
            return AutoModelForCausalLM.from_pretrained(model, **fields)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "a strategy distributes a model that exists",
            where="model",
            found=repr(model),
            allowed="a model, on the CPU and whole",
            hint="AutoModelForCausalLM.from_pretrained(NAME, dtype='float32'), after the training arguments",
        )
    return model
