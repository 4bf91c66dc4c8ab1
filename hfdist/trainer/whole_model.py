"""The whole model that a Trainer is constructed with: given, made by `model_init`, or read by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, set_seed
from transformers.trainer_utils import number_of_arguments

from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.names.weight_names import read_names
from hfdist.strategies.base import Strategy
from hfdist.trainer.trl_trainers import Arguments, trains_causal_lm


def find_model(kind: type, arguments: Arguments, strategy: Strategy) -> nn.Module:
    """Give the model of a Trainer's arguments; a name is read where it can only mean a causal model.

    Args:
        kind: the class of the trainer.
        arguments: those of its constructor, by name, `args` among them.
        strategy: the layout.

    Raises:
        ConfigError: there is no model, it is wrapped, or its files cannot be read.
    """
    model, model_init = arguments.get("model"), arguments.get("model_init")
    if model is None and model_init is not None:
        # The original also gives a trial of a search, or None, to a function that takes one.
        set_seed(arguments["args"].seed)
        made: nn.Module = model_init(*[None] * number_of_arguments(model_init))
        return made
    if isinstance(model, str) and trains_causal_lm(kind):
        return _read(model, arguments["args"], strategy)
    if not isinstance(model, nn.Module):
        what = "a strategy distributes a model that exists"
        hint = "AutoModelForCausalLM.from_pretrained(NAME, dtype='float32'), after the training arguments"
        raise ConfigError(what, where="model", found=repr(model), allowed="a model, on the CPU and whole", hint=hint)
    _check_plain(model)
    return model


def _read(name: str, args: Any, strategy: Strategy) -> nn.Module:
    """Read a model by its name; `args` are the Trainer's, those of TRL with `model_init_kwargs`."""
    fields: dict[str, Any] = {"dtype": torch.float32} | (getattr(args, "model_init_kwargs", None) or {})
    # A .bin file is a pickle, which can run code; and where the model goes is the strategy's business.
    fields |= {"use_safetensors": True, "device_map": None}
    with strategy.without_partitioning(args):
        names = read_names(AutoModelForCausalLM, name, where="model", **fields)
    names.check(where="model", name=name, hint="the model itself in place of its name, if it is meant to be so")
    with reading_from_hub("model", name):
        read: nn.Module = AutoModelForCausalLM.from_pretrained(name, **fields)
    return read


def _check_plain(model: nn.Module) -> None:
    """Refuse a model that torch has wrapped already."""
    is_compiled = model._modules.get("_orig_mod") is not None
    if is_compiled or isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        hint = "the model that this one wraps"
        if is_compiled:
            hint = "TrainingArguments(torch_compile=True), and the model as it was before torch.compile"
        raise ConfigError("a strategy distributes a plain model", where="model", found=type(model).__name__, hint=hint)
