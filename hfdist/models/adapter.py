"""Adapters of PEFT: checks the config before there is a model, then puts the adapter into the whole model.

The model keeps its class; `wrap_model` gives PEFT's wrapper besides. In every layout, the model is whole when the
adapter's weights are drawn, layer by layer from one seed. So the weights are the same in every layout.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from hfdist.config.model import ALL_LINEAR, AdapterConfig, Init, ModelConfig
from hfdist.errors import ConfigError, HfdistError, nearest
from hfdist.models.adapter_parts import aim_at_parts
from hfdist.models.embeddings import input_embeddings
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.partitioning import Partitioning
from hfdist.models.quantize import check_installed

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel, PeftType

_WHOLE = Partitioning()

# PEFT is imported only if the config asks for an adapter: the import takes a second.

WEIGHTS = "adapter_model.safetensors"
NAME = "default"
"""PEFT's name of a model's only adapter; in files it is left out."""

_WHOLE_MODEL = "it works on the model as a whole, not in its layers"
_BETWEEN_STEPS = "it wants to be called between steps, to choose anew what is trained"
_SHARED = "its layers share weights, which could not be on several ranks"
_REFUSED = {
    "ADALORA": _BETWEEN_STEPS,
    "ADAMSS": _BETWEEN_STEPS,
    "LILY": _SHARED,
    "OSF": "it changes gradients by numbers that it keeps outside of the model's state",
    "POLY": "it needs the number of a task with each batch",
    "RANDLORA": _SHARED,
    "SHIRA": "PEFT packs its weights anew when it saves them",
    "SHADOW": _WHOLE_MODEL,
    "XLORA": _WHOLE_MODEL,
}

_ON_DRAWS = "it draws numbers in each forward, other ones on each rank"
_ON_INPUTS = "it looks at the inputs of the whole model, which its layers do not have"
_REFUSED_FIELDS = {
    "alora_invocation_tokens": _ON_INPUTS,
    "arrow_config": _ON_INPUTS,
    "kasa_config": "it changes the model's own weights, from all of each",
    "layer_replication": "its layers share the model's weights, which could not be on several ranks",
    "megatron_config": "it is for layers of Megatron",
    "monteclora_config": _ON_DRAWS,
    "velora_config": "it keeps what it has learned of the first batch on each rank",
}

_FIELDS = {
    "rank": ("r",),
    "alpha": ("lora_alpha", "alpha", "{type}_alpha"),
    "dropout": ("lora_dropout", "{type}_dropout", "module_dropout"),
    "rslora": ("use_rslora",),
    "dora": ("use_dora",),
    "modules_to_save": ("modules_to_save",),
}
"""Keys of `adapter`, and the fields of PEFT's classes that they set."""
_PLAIN_LORA = "peft.LoraConfig(target_modules='all-linear')"
_STARTS = (True, False, "gaussian", "pissa", "olora", "orthogonal", "mica")
"""Values of `init_lora_weights`; all but the first three look at the model's weights."""
_GATHERING = ("LORA", "PSOFT", "TRAINABLE_TOKENS")
"""Types that gather the partitioned weights that they need by themselves, layer by layer."""
_SET_HERE = ("target_modules", "task_type", "inference_mode", "peft_type", "base_model_name_or_path", "revision")
"""Fields that hfdist sets."""


def check_adapter(config: AdapterConfig, model: ModelConfig, layout: Partitioning = _WHOLE) -> None:
    """Check `adapter.*` against PEFT and the layout, before anything is built; without an adapter, load nothing.

    Raises:
        ConfigError: a type, an argument or a value that PEFT does not take, or that cannot be trained here or in this
            layout, or a saved adapter that cannot be read.
    """
    if not config.is_used:
        return
    if config.merge and model.init is Init.random:
        what = "an adapter is merged into the weights of a pretrained model, and these are random"
        hint = "model=hub model.name=ID, or adapter.merge=false"
        raise ConfigError(what, where="adapter.merge", found="true, with model.init=random", hint=hint)
    if config.quantization is not None:
        check_installed(config.quantization)
    asked = make_peft_config(config)
    _check_peft_config(asked, layout, where="adapter.*", field="adapter.arguments", hint="adapter=lora")
    if config.quantization is not None and (asked.peft_type.value != "LORA" or asked.use_dora):
        what, found = "the saved adapter looks at the weights that it stands beside", str(asked.peft_type.value)
        hint = "adapter.quantization=null"
        raise ConfigError(what, where="adapter.path", found=found, allowed="LoRA without DoRA", hint=hint)


def make_peft_config(config: AdapterConfig) -> Any:
    """Give the `peft.PeftConfig` that the keys ask for.

    Raises:
        ConfigError: see `check_adapter`.
    """
    if config.path is not None:
        return _saved_config(config.path)
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = _find_type(str(config.type))
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(config_class) if field.init}
    _check_arguments(config, config_class.__name__, fields)
    values = {**_translate(config, kind.value.lower(), fields), **config.arguments}
    is_all = config.target_pattern is None and config.targets == [ALL_LINEAR]
    if config.target_parts is not None:
        # The model says which layers these are: `aim_at_parts`.
        values["target_modules"] = []
    elif not (is_all and "feedforward_modules" in fields):
        # IA3 must know the feed-forward layers; without `target_modules`, PEFT takes them from its table of models.
        values["target_modules"] = config.target_pattern or (ALL_LINEAR if is_all else list(config.targets))
    try:
        return config_class(task_type="CAUSAL_LM", **values)
    except (ValueError, TypeError, ImportError) as error:
        raise refusal(error, "adapter.*") from error


def reads_weights(config: AdapterConfig) -> bool:
    """Whether the adapter's first values may depend on the model's weights; if so, these need their final dtype."""
    if not config.is_used or config.path is not None:
        return False
    start = config.arguments.get("init_lora_weights", True)
    return str(config.type).upper() != "LORA" or config.dora or start not in _STARTS[:3]


def refusal(error: Exception, where: str, hint: str | None = None) -> ConfigError:
    """Turn an exception of PEFT into a ConfigError about the key `where`."""
    text = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"PEFT refuses the adapter: {text[:300]}", where=where, hint=hint)


def _saved_config(path: str) -> PeftConfig:
    from peft import PeftConfig

    with reading_from_hub("adapter.path", path):
        # This fails if there is no safetensors file, so that PEFT never reads a pickle instead.
        cached_file(path, WEIGHTS)
        peft_config = PeftConfig.from_pretrained(path)
        kind = str(peft_config.peft_type.value)
        peft_config.inference_mode = False
    _find_type(kind, where="adapter.path")
    return peft_config


def _find_type(name: str, *, where: str = "adapter.type") -> PeftType:
    """Give PEFT's enum value for the name of a type.

    Raises:
        ConfigError: PEFT has none of that name, or it cannot be trained here.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value.lower(): kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    usable = sorted(word for word, kind in known.items() if _reason_against(kind) is None)
    kind, allowed = known.get(name.lower()), ", ".join(usable)
    if kind is None:
        hint = nearest(name.lower(), usable, "adapter.type={}") or "adapter=lora"
        raise ConfigError("PEFT has no adapter of this type", where=where, found=name, allowed=allowed, hint=hint)
    reason = _reason_against(kind)
    if reason is not None:
        what = f"this type cannot be trained here: {reason}"
        raise ConfigError(what, where=where, found=name, allowed=allowed, hint="adapter=lora")
    return kind


def _reason_against(kind: PeftType) -> str | None:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PromptLearningConfig

    if kind.value in _REFUSED:
        return _REFUSED[kind.value]
    config_class, tuner = PEFT_TYPE_TO_CONFIG_MAPPING[kind], PEFT_TYPE_TO_TUNER_MAPPING.get(kind)
    fields = {field.name for field in dataclasses.fields(config_class)}
    if issubclass(config_class, PromptLearningConfig) or "adapter_layers" in fields:
        return "it learns a prompt, not weights in the model's layers"
    if tuner is None or tuner.uses_shared_state:
        return _SHARED
    return None


def _check_arguments(config: AdapterConfig, class_name: str, fields: set[str]) -> None:
    ours = {name.format(type=config.type): key for key, names in _FIELDS.items() for name in names}
    for name, value in config.arguments.items():
        where = f"adapter.arguments.{name}"
        if name in ours or name in _SET_HERE:
            what, key = "hfdist sets this field itself, from its own keys", ours.get(name, "*")
            key = "targets" if name == "target_modules" else key
            raise ConfigError(what, where=where, found=value, hint=f"set adapter.{key} instead")
        if name not in fields:
            what = f"PEFT's {class_name} has no such field"
            hint = nearest(name, fields, f"adapter.arguments.{{}}={value}")
            raise ConfigError(what, where=where, found=value, allowed=f"a field of {class_name}", hint=hint)


def check_adapted(model: Any, layout: Partitioning, *, where: str) -> None:
    """Check the adapters of a model that is still whole, however they came into it.

    Args:
        model: a `peft.PeftModel`, or a model with adapters in it; its `peft_config` has a config for each.
        layout: in which it will be trained.
        where: what gave the adapter, for messages.

    Raises:
        ConfigError: what cannot be trained here or in this layout, or would be saved as something else.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    configs = model.peft_config
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for peft_config in configs.values():
        _check_peft_config(peft_config, layout, where=where, field=where, hint=_PLAIN_LORA)
    used = {NAME} | {name for layer in layers for name in layer.active_adapters}
    if NAME not in configs or len(used) > 1:
        what = "one adapter is trained and saved, under PEFT's own first name"
        found = ", ".join(sorted({*configs} | used))
        hint = "peft.get_peft_model(model, config), which gives it this name; merge others into the model before"
        raise ConfigError(what, where=where, found=found, allowed=NAME, hint=hint)
    _check_tied(model, where)
    _check_not_shared(model, where)


def _check_peft_config(peft_config: Any, layout: Partitioning, *, where: str, field: str, hint: str) -> None:
    """Refuse methods and fields by which training would be another here, or in this layout.

    Args:
        peft_config: a `peft.PeftConfig`.
        layout: how the model is partitioned.
        where: what gave the config, for messages.
        field: what gave its fields.
        hint: a method that can be trained.
    """
    kind = peft_config.peft_type
    reason = _reason_against(kind)
    if reason is not None:
        what = f"this type cannot be trained here: {reason}"
        raise ConfigError(what, where=where, found=kind.value.lower(), hint=hint)
    for name, reason in _REFUSED_FIELDS.items():
        if (value := getattr(peft_config, name, None)) is not None:
            what = f"this cannot be trained here: {reason}"
            raise ConfigError(what, where=f"{field}.{name}", found=value, allowed="null", hint=f"without {name}")
    if kind.value == "LORA" and peft_config.init_lora_weights not in _STARTS:
        raise ConfigError(
            "first weights that need data beforehand, or that could not be made again when the adapter is opened",
            where=f"{field}.init_lora_weights",
            found=peft_config.init_lora_weights,
            allowed=", ".join(str(known).lower() for known in _STARTS),
        )
    trains_tokens = (
        kind.value == "TRAINABLE_TOKENS" or getattr(peft_config, "trainable_token_indices", None) is not None
    )
    if trains_tokens and layout.shares:
        name = "token_indices" if kind.value == "TRAINABLE_TOKENS" else "trainable_token_indices"
        what = "PEFT writes trained tokens into the whole embedding, of which ranks have parts in this layout"
        found, hint = f"{kind.value.lower()}, with {layout.shares}", "strategy=ddp or strategy=zero2, of one stage"
        raise ConfigError(what, where=f"{field}.{name}", found=found, hint=hint)


def _translate(config: AdapterConfig, kind: str, fields: set[str]) -> dict[str, object]:
    default, values = AdapterConfig(), {}
    for key, names in _FIELDS.items():
        value = getattr(config, key)
        if value == getattr(default, key):
            continue
        name = next((name for name in (n.format(type=kind) for n in names) if name in fields), None)
        if name is None:
            raise ConfigError(
                "this type of adapter has nothing of the kind",
                where=f"adapter.{key}",
                found=f"{value}, with adapter.type={kind}",
                allowed=str(getattr(default, key)).lower().replace("none", "null"),
                hint=f"adapter=none adapter.type={kind} sets nothing but the type",
            )
        values[name] = value
    return values


def add_adapter(
    model: PreTrainedModel, config: AdapterConfig, base: ModelConfig, *, seed: int, layout: Partitioning
) -> None:
    """Put the adapter into a model that has all its blocks, in place, and freeze the model's own weights.

    Args:
        model: as its constructor left it.
        config: with an adapter.
        base: where the model's weights come from.
        seed: of the adapter's weights.
        layout: how the model is partitioned.

    Raises:
        ConfigError: targets or parts that the model does not have, or what PEFT refuses.
    """
    peft_config = make_peft_config(config)
    if config.path is None:
        _check_targets(model, config)
    if config.target_parts is not None:
        aim_at_parts(model, peft_config, config.target_parts)
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
    peft_config.base_model_name_or_path, peft_config.revision = base.name, base.revision
    check_adapted(model, layout, where="adapter")
    if config.path is not None:
        _load(model, config.path)
    compute_by_factors(model)


def compute_by_factors(model: PreTrainedModel) -> None:
    """Let LoRA cost no more than its factors do, in place: see `expert_factors.use_factors`."""
    # With PEFT, which takes a second.
    from hfdist.models.expert_factors import use_factors

    use_factors(model)


def inject_adapter(model: PreTrainedModel, peft_config: PeftConfig, name: str) -> None:
    """Put an adapter into a model in place, active, as `PreTrainedModel.add_adapter` does.

    PEFT's own function: transformers 5.24 refuses the PEFT that works with it.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config, model, name)
    # By this transformers' Trainer and `save_pretrained` know that there is one.
    model._hf_peft_config_loaded = True


def wrap_model(model: PreTrainedModel, peft_config: PeftConfig, *, seed: int, layout: Partitioning) -> PeftModel:
    """Put the adapter of a `peft.PeftConfig` into a model that has all its blocks, as TRL's trainers do.

    Args:
        model: changed in place; its own weights are frozen.
        peft_config: stays as it is.
        seed: of all random numbers from now on, and so of the adapter's weights.
        layout: how the model is partitioned.

    Returns:
        A `peft.PeftModel`, whose `get_base_model()` is `model`.

    Raises:
        ConfigError: no PEFT config, a type or first weights that cannot be trained here, or what PEFT refuses.
    """
    from peft import get_peft_model

    _check_given(model, peft_config, layout)
    peft_config = copy.deepcopy(peft_config)
    if peft_config.task_type is None:
        # By these PEFT's `AutoPeftModel` finds the class of the model; its wrapper would write them with a save.
        owner = type(model)
        peft_config.auto_mapping = {"base_model_class": owner.__name__, "parent_library": owner.__module__}
    set_seed(seed)
    with layout.gathered(_needed_weights(model, peft_config), writes=False):
        try:
            # As TRL has it: in ZeRO-3, DeepSpeed gathers weights of one type only.
            autocasts = not layout.partitions_in_constructor
            wrapped = get_peft_model(model, peft_config, NAME, autocast_adapter_dtype=autocasts)
        except (ValueError, TypeError, LookupError, RuntimeError, ImportError) as error:
            raise refusal(error, "peft_config", _PLAIN_LORA) from error
    return wrapped


def _check_given(model: PreTrainedModel, peft_config: object, layout: Partitioning) -> None:
    from peft import PeftConfig

    is_config, found = isinstance(peft_config, PeftConfig), type(peft_config).__name__
    if not is_config:
        raise ConfigError("this is no config of an adapter", where="peft_config", found=found, hint=_PLAIN_LORA)
    if getattr(model, "peft_config", None):
        what, hint = "the model has an adapter already", "the model with its adapter, and no peft_config"
        raise ConfigError(what, where="peft_config", found=", ".join(model.peft_config), hint=hint)
    _check_peft_config(peft_config, layout, where="peft_config", field="peft_config", hint=_PLAIN_LORA)


def _needed_weights(model: PreTrainedModel, peft_config: Any) -> list[nn.Parameter]:
    """List the weights that must be whole while the adapter is made."""
    return [] if peft_config.peft_type.value in _GATHERING else list(model.parameters())


def _load(model: PreTrainedModel, path: str) -> None:
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
        words = f"{path}: {_some(missing)} missing, {_some(found.unexpected_keys)} unknown"
        raise ConfigError("the saved adapter is not of this model", where="adapter.path", found=words)


def _check_targets(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Refuse a name that matches nothing: PEFT ignores it if another name matches."""
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
    allowed = f"{', '.join(layers)} (its linear layers), {ALL_LINEAR}, or another module's name"
    # A pattern is of whole names.
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
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.rpartition(f".{NAME}")[0].rpartition(".")[0]
        first = owners.setdefault(id(parameter), block)
        is_tied_copy = ".modules_to_save." in name
        if parameter.requires_grad and first != block and not is_tied_copy:
            what = "the adapter's layers share weights, which could not be on several ranks"
            raise ConfigError(what, where=where, found=f"{name} is also a weight of {first}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "nothing"
