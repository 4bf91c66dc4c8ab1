"""Adapters of PEFT, put into a model before anything cuts it.

The model keeps its class, and is whole in every layout when the adapter is drawn, layer by layer under one seed. So
the same weights come out whatever is cut afterwards.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from hfdist.config.adapter import ALL_LINEAR, AdapterConfig
from hfdist.config.model import ModelConfig
from hfdist.errors import ConfigError
from hfdist.models.hub.client import reading_from_hub
from hfdist.models.trainable.adapter_config import WEIGHTS, make_peft_config, refusal

# PEFT is imported where an adapter is asked for: that takes a second.

NAME = "default"
"""PEFT's name of a model's only adapter; in files it is left out."""


# Types that gather the weights they look at under ZeRO-3, layer by layer.
_GATHERING = ("LORA", "PSOFT", "TRAINABLE_TOKENS")


def add_adapter(model: PreTrainedModel, config: AdapterConfig, base: ModelConfig, *, seed: int) -> None:
    """Put the adapter into a whole model, in place, and freeze the model's own weights.

    Args:
        model: whole, or cut by ZeRO-3.
        config: with an adapter.
        base: where the model's weights come from.
        seed: of the adapter's weights.

    Raises:
        ConfigError: targets that the model does not have, or what PEFT refuses.
    """
    peft_config = make_peft_config(config)
    if config.path is None:
        _check_targets(model, config)
    _check_tied(model, peft_config)
    with torch.random.fork_rng(), warnings.catch_warnings(), _shapes_of(model, peft_config):
        # About an embedding that is saved too, or a transposed weight: nothing that a user could act on.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            model.add_adapter(peft_config, NAME)
        except (ValueError, TypeError, LookupError, RuntimeError, ImportError) as error:
            raise refusal(error, "adapter.*") from error
    peft_config.base_model_name_or_path, peft_config.revision = base.name, base.revision
    _check_not_shared(model)
    if config.path is not None:
        _load(model, config.path)


def _shapes_of(model: PreTrainedModel, peft_config: Any) -> AbstractContextManager[object]:
    """Under ZeRO-3, let all weights be there for types of adapters that look at them and do not gather them."""
    if not is_deepspeed_zero3_enabled() or peft_config.peft_type.value in _GATHERING:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def _load(model: PreTrainedModel, path: str) -> None:
    from peft import set_peft_model_state_dict

    with reading_from_hub("adapter.path", path):
        weights = load_file(str(cached_file(path, WEIGHTS)))
    values = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
    try:
        found: Any = set_peft_model_state_dict(model, values, adapter_name=NAME)
    except (RuntimeError, KeyError) as error:
        raise refusal(error, "adapter.path") from error
    missing = [name for name in found.missing_keys if model.get_parameter(name).requires_grad]
    if missing or found.unexpected_keys:
        raise ConfigError(
            "the saved adapter is not of this model",
            where="adapter.path",
            found=f"{path}: {_some(missing)} missing, {_some(found.unexpected_keys)} unknown",
        )


def _check_targets(model: PreTrainedModel, config: AdapterConfig) -> None:
    """PEFT passes over a name that matches nothing, as long as another one matches."""
    names = [name for name, _ in model.named_modules() if name]
    wanted = [] if config.target_pattern or config.targets == [ALL_LINEAR] else config.targets
    for key, name in [*(("targets", n) for n in wanted), *(("modules_to_save", n) for n in config.modules_to_save)]:
        if not any(module == name or module.endswith(f".{name}") for module in names):
            raise _no_target(model, f"adapter.{key}", name)
    pattern = config.target_pattern
    if pattern is None:
        return
    try:
        matches = any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
        raise ConfigError(f"not a regular expression: {error}", where="adapter.target_pattern", found=pattern) from None
    if not matches:
        raise _no_target(model, "adapter.target_pattern", pattern)


def _no_target(model: PreTrainedModel, key: str, name: str) -> ConfigError:
    linear = [n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    layers = list(dict.fromkeys(linear))
    near = difflib.get_close_matches(name, layers, n=1, cutoff=0.5)
    return ConfigError(
        "the model has no layer of this name",
        where=key,
        found=name,
        allowed=f"{', '.join(layers)} (its linear layers), {ALL_LINEAR}, or another module's name",
        hint=f"{key}=[{near[0]}]" if near else None,
    )


def _check_tied(model: PreTrainedModel, peft_config: Any) -> None:
    """An adapter on one of two names of a weight would, once merged, change both."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return
    targets = peft_config.target_modules
    for name, module in model.named_modules():
        if module is not head and module is not embedding:
            continue
        is_target = isinstance(targets, (set, list)) and any(name == t or name.endswith(f".{t}") for t in targets)
        is_matched = isinstance(targets, str) and targets != ALL_LINEAR and re.fullmatch(targets, name) is not None
        if is_target or is_matched:
            raise ConfigError(
                "the model's head and its input embedding are one weight, to which only one of them would be adapted",
                where="adapter.targets",
                found=name,
                hint=f"adapter.modules_to_save=[{name}], which trains a copy of it whole, or other targets",
            )


def _check_not_shared(model: PreTrainedModel) -> None:
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.rpartition(f".{NAME}")[0].rpartition(".")[0]
        first = owners.setdefault(id(parameter), block)
        is_tied_copy = ".modules_to_save." in name
        if parameter.requires_grad and first != block and not is_tied_copy:
            raise ConfigError(
                "the adapter's layers share weights, which could not be on several ranks",
                where="adapter.arguments",
                found=f"{name} is also a weight of {first}",
            )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "nothing"
