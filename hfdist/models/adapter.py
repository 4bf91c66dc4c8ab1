"""Adapters of PEFT, put into a model and checked there.

    add_adapter     for hfdist's own runs: the model keeps its class, and gets layers of PEFT inside
    wrap_model      for trainers like those of TRL: PEFT's wrapper around the model

In every layout, the model is whole when the adapter's weights are drawn, layer by layer from one seed. So the weights
are the same in every layout.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from hfdist.config.model import ALL_LINEAR, AdapterConfig, ModelConfig
from hfdist.errors import ConfigError, HfdistError, nearest
from hfdist.models.adapter_parts import aim_at_parts
from hfdist.models.embeddings import classifies_tokens, has_no_head, input_embeddings, scores_sequences
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.partitioning import Partitioning
from hfdist.models.peft_config import PLAIN_LORA, WEIGHTS, check_peft_config, make_peft_config, refusal
from hfdist.units import list_first

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# PEFT is imported only if the config asks for an adapter: the import takes a second.

NAME = "default"
"""PEFT's name of a model's only adapter; in files it is left out."""
_GATHERING = ("LORA", "PSOFT", "TRAINABLE_TOKENS")
"""Types that gather the partitioned weights that they need by themselves, layer by layer."""


def check_adapted(model: Any, layout: Partitioning, *, where: str) -> None:
    """Check the adapters of a model that is still whole, however they came into it.

    Args:
        model: a `peft.PeftModel`, or a model with adapters in it; its `peft_config` has a config for each adapter.
        layout: the layout in which the model will be trained.
        where: the key or argument that gave the adapter, for messages.

    Raises:
        ConfigError: an adapter that cannot be trained here or in this layout, or would be saved as something else.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    configs = model.peft_config
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for peft_config in configs.values():
        check_peft_config(peft_config, layout, where=where, field=where, hint=PLAIN_LORA)
    used = {NAME} | {name for layer in layers for name in layer.active_adapters}
    if NAME not in configs or len(used) > 1:
        what = "one adapter is trained and saved, under PEFT's own first name"
        found = ", ".join(sorted({*configs} | used))
        hint = "peft.get_peft_model(model, config), which gives it this name; merge others into the model before"
        raise ConfigError(what, where=where, found=found, allowed=NAME, hint=hint)
    _check_tied(model, where)
    _check_not_shared(model, where)


def add_adapter(
    model: PreTrainedModel, config: AdapterConfig, base: ModelConfig, *, seed: int, layout: Partitioning
) -> None:
    """Put the adapter into a model that has all its blocks, in place, and freeze the model's own weights.

    Args:
        model: the model as its constructor left it.
        config: the keys of the adapter, which must ask for one.
        base: the config that names the model; the adapter's own files say which model they belong to.
        seed: seeds the adapter's first weights.
        layout: how the model is partitioned.

    Raises:
        ConfigError: targets or parts that the model does not have, or what PEFT refuses.
    """
    peft_config = make_peft_config(config)
    if config.path is None:
        _check_targets(model, config)
    if config.target_parts is not None:
        aim_at_parts(model, peft_config, config.target_parts)
    if config.path is None:
        _train_new_head(model, peft_config)
    needed = _needed_weights(model, peft_config)
    with torch.random.fork_rng(), warnings.catch_warnings(), layout.gathered(needed, writes=False):
        # PEFT warns of an embedding that is saved too, or of a transposed weight: a user can do nothing about these.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            inject_adapter(model, peft_config, NAME)
        except (HfdistError, MemoryError):
            raise
        except Exception as error:  # a saved adapter's config may hold anything
            raise refusal(error, "adapter.*" if config.path is None else f"adapter.path ({config.path})") from error
    peft_config.task_type = _task_type(model)
    peft_config.base_model_name_or_path, peft_config.revision = base.name, base.revision
    check_adapted(model, layout, where="adapter")
    if config.path is not None:
        _load(model, config.path)
    # This imports PEFT, which takes a second.
    from hfdist.models.expert_factors import use_factors

    use_factors(model)


def _task_type(model: PreTrainedModel) -> str:
    """Name the kind of model for PEFT, which opens the adapter with a class of its own for each."""
    if has_no_head(model):
        return "FEATURE_EXTRACTION"
    if scores_sequences(model):
        return "SEQ_CLS"
    if classifies_tokens(model):
        return "TOKEN_CLS"
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _train_new_head(model: PreTrainedModel, peft_config: PeftConfig) -> None:
    """Let the layers beside the base model be trained whole where they give labels, as PEFT has it: they are new."""
    if not (scores_sequences(model) or classifies_tokens(model)):
        return
    base: nn.Module = model.base_model
    beside_base = {name: child for name, child in model.named_children() if child is not base}
    heads = [name for name, child in beside_base.items() if list(child.parameters())]
    # The config's class has this field only for some types of adapters.
    asked = getattr(peft_config, "modules_to_save", None) or ()
    setattr(peft_config, "modules_to_save", list(dict.fromkeys([*asked, *heads])))  # noqa: B010


def inject_adapter(model: PreTrainedModel, peft_config: PeftConfig, name: str) -> None:
    """Put an adapter into a model in place, active, as `PreTrainedModel.add_adapter` does.

    PEFT's own function: transformers 5.24 refuses the PEFT that works with it.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config, model, name)
    # A private mark by which transformers' Trainer and `save_pretrained` know that there is an adapter.
    model._hf_peft_config_loaded = True


def wrap_model(model: PreTrainedModel, peft_config: PeftConfig, *, seed: int, layout: Partitioning) -> PeftModel:
    """Put the adapter of a `peft.PeftConfig` into a model that has all its blocks, as TRL's trainers do.

    Args:
        model: the model, which is changed in place; its own weights are frozen.
        peft_config: the adapter's config, which is not changed.
        seed: seeds all random numbers from now on, and so the adapter's first weights.
        layout: how the model is partitioned.

    Returns:
        A `peft.PeftModel`, whose `get_base_model()` is `model`.

    Raises:
        ConfigError: `peft_config` is no config of PEFT, or asks for what cannot be trained here or PEFT refuses.
    """
    from peft import get_peft_model

    _check_given(model, peft_config, layout)
    peft_config = copy.deepcopy(peft_config)
    if peft_config.task_type is None:
        # PEFT's `AutoPeftModel` finds the model's class by these; PEFT's wrapper would add them when it saves.
        owner = type(model)
        peft_config.auto_mapping = {"base_model_class": owner.__name__, "parent_library": owner.__module__}
    set_seed(seed)
    with layout.gathered(_needed_weights(model, peft_config), writes=False):
        try:
            # TRL does the same: under ZeRO-3, DeepSpeed gathers weights of one type only.
            autocasts = not layout.partitions_in_constructor
            wrapped = get_peft_model(model, peft_config, NAME, autocast_adapter_dtype=autocasts)
        except (ValueError, TypeError, LookupError, RuntimeError, ImportError) as error:
            raise refusal(error, "peft_config", PLAIN_LORA) from error
    return wrapped


def _check_given(model: PreTrainedModel, peft_config: object, layout: Partitioning) -> None:
    """Refuse a config that is none of PEFT's or cannot be trained, and a model that has an adapter already."""
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        what, found = "this is no config of an adapter", type(peft_config).__name__
        raise ConfigError(what, where="peft_config", found=found, hint=PLAIN_LORA)
    if getattr(model, "peft_config", None):
        what, hint = "the model has an adapter already", "the model with its adapter, and no peft_config"
        raise ConfigError(what, where="peft_config", found=", ".join(model.peft_config), hint=hint)
    check_peft_config(peft_config, layout, where="peft_config", field="peft_config", hint=PLAIN_LORA)


def _needed_weights(model: PreTrainedModel, peft_config: PeftConfig) -> list[nn.Parameter]:
    """List the weights that must be whole while the adapter is made."""
    kind = str(getattr(peft_config.peft_type, "value", ""))
    return [] if kind in _GATHERING else list(model.parameters())


def _load(model: PreTrainedModel, path: str) -> None:
    """Read the weights of the adapter saved at `path`, a folder or Hub id, into a model with an adapter like it."""
    from peft import set_peft_model_state_dict

    with reading_from_hub("adapter.path", path):
        weights = load_file(str(cached_file(path, WEIGHTS)))
    values = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
    try:
        found: Any = set_peft_model_state_dict(model, values, adapter_name=NAME)
    except Exception as error:  # on weights of unknown origin
        raise refusal(error, "adapter.path") from error
    # Buffers are missing, too, and parameters that the adapter has nothing to do with.
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    missing = [name for name in found.missing_keys if name in trained]
    if missing or found.unexpected_keys:
        named_missing = list_first(missing, 3) or "nothing"
        named_unknown = list_first(found.unexpected_keys, 3) or "nothing"
        differences = f"{path}: {named_missing} missing, {named_unknown} unknown"
        raise ConfigError("the saved adapter is not of this model", where="adapter.path", found=differences)


def _check_targets(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Refuse a name or pattern that matches no module: PEFT ignores such a name if another one matches."""
    names = [name for name, _ in model.named_modules() if name]
    has_names = config.target_pattern is None and config.targets != [ALL_LINEAR]
    wanted = {"targets": config.targets if has_names else [], "modules_to_save": config.modules_to_save}
    for key, wanted_names in wanted.items():
        for wanted_name in wanted_names:
            if not any(name == wanted_name or name.endswith(f".{wanted_name}") for name in names):
                raise _no_target(model, f"adapter.{key}", wanted_name)
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
    """Make the error about a name or pattern that matches no module, with the nearest name of a linear layer."""
    linear = [n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    layers = list(dict.fromkeys(linear))
    allowed = f"{', '.join(layers)} (its linear layers), {ALL_LINEAR}, or another module's name"
    # A pattern must match the whole name of a module, with its path; a name in a list needs only the end.
    form = f"'{key}=\".*{{}}\"'" if key == "adapter.target_pattern" else f"{key}=[{{}}]"
    hint = nearest(name, layers, form)
    return ConfigError("the model has no layer of this name", where=key, found=name, allowed=allowed, hint=hint)


def _check_tied(model: PreTrainedModel, where: str) -> None:
    """Refuse an adapter on one of two tied weights: once merged, it would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    embedding, head = input_embeddings(model), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return
    for name, module in model.named_modules():
        if (module is head or module is embedding) and isinstance(module, BaseTunerLayer):
            what = "the model's head and its input embedding are one weight, to which only one of them would be adapted"
            name = name.rpartition(".")[2]
            hint = f"{where}.modules_to_save=['{name}'], which trains a copy of it whole, or other targets"
            raise ConfigError(what, where=where, found=name, hint=hint)


def _check_not_shared(model: PreTrainedModel, where: str) -> None:
    """Refuse an adapter of which several layers have one weight: they may be on different ranks."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.rpartition(f".{NAME}")[0].rpartition(".")[0]
        first = owners.setdefault(id(parameter), block)
        is_tied_copy = ".modules_to_save." in name
        if parameter.requires_grad and first != block and not is_tied_copy:
            what = "the adapter's layers share weights, which could not be on several ranks"
            raise ConfigError(what, where=where, found=f"{name} is also a weight of {first}")
