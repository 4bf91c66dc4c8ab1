"""The config of an adapter of PEFT: made from the keys `adapter.*`, and checked before there is a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.hub import cached_file

from hfdist.config.model import ALL_LINEAR, AdapterConfig, Init, ModelConfig
from hfdist.errors import ConfigError, nearest
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.partitioning import WHOLE, Partitioning
from hfdist.models.quantize import check_installed

if TYPE_CHECKING:
    from peft import PeftConfig, PeftType

# PEFT is imported only if the config asks for an adapter: the import takes a second.

WEIGHTS = "adapter_model.safetensors"
"""The file of an adapter's weights."""
_CONFIG = "adapter_config.json"

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
"""Types of PEFT that cannot be trained here, and why."""

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
"""Fields of PEFT's classes that must be None, and why."""

_FIELDS = {
    "rank": ("r",),
    "alpha": ("lora_alpha", "alpha", "{type}_alpha"),
    "dropout": ("lora_dropout", "{type}_dropout", "module_dropout"),
    "rslora": ("use_rslora",),
    "dora": ("use_dora",),
    "modules_to_save": ("modules_to_save",),
}
"""Names of the fields of PEFT's classes that a key of `adapter` may set; `{type}` stands for the type of adapter."""

PLAIN_LORA = "peft.LoraConfig(target_modules='all-linear')"
"""A config that can be trained in each layout, for hints."""

_BLIND_STARTS = (True, False, "gaussian")
"""Values of `init_lora_weights` that draw first weights without a look at the model's own."""
_STARTS = (*_BLIND_STARTS, "pissa", "olora", "orthogonal", "mica")
"""Values of `init_lora_weights` that can be trained here."""

_SET_HERE = ("target_modules", "task_type", "inference_mode", "peft_type", "base_model_name_or_path", "revision")
"""Fields that hfdist sets."""


def check_adapter(config: AdapterConfig, model: ModelConfig, layout: Partitioning = WHOLE) -> None:
    """Check `adapter.*` against PEFT and the layout, before anything is built. PEFT is loaded only with an adapter.

    Args:
        config: the keys of the adapter.
        model: the keys of the model.
        layout: how the model will be partitioned.

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
    check_peft_config(asked, layout, where="adapter.*", field="adapter.arguments", hint="adapter=lora")
    if config.quantization is not None and (asked.peft_type.value != "LORA" or asked.use_dora):
        what, found = "the saved adapter looks at the weights that it stands beside", str(asked.peft_type.value)
        hint = "adapter.quantization=null"
        raise ConfigError(what, where="adapter.path", found=found, allowed="LoRA without DoRA", hint=hint)


def make_peft_config(config: AdapterConfig) -> Any:
    """Make the `peft.PeftConfig` that the keys ask for, or read that of a saved adapter.

    Raises:
        ConfigError: a type, an argument or a value that PEFT does not take, or a saved adapter that cannot be read.
    """
    # Any: PEFT has a class for each type, with fields of its own.
    if config.path is not None:
        return _saved_config(config.path)
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = _find_type(str(config.type))
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    type_name = kind.value.lower()
    fields = {field.name for field in dataclasses.fields(config_class) if field.init}
    _check_arguments(config, type_name, config_class.__name__, fields)
    values = {**_translate(config, type_name, fields), **config.arguments}
    if config.target_parts is not None:
        # Which layers these are is known once there is a model: `aim_at_parts` fills them in.
        values["target_modules"] = []
    elif config.target_pattern is not None:
        values["target_modules"] = config.target_pattern
    elif config.targets != [ALL_LINEAR]:
        values["target_modules"] = list(config.targets)
    elif "feedforward_modules" not in fields:
        # Without `target_modules`, PEFT takes IA3's from its table of models, which names the feed-forward layers.
        values["target_modules"] = ALL_LINEAR
    try:
        return config_class(task_type="CAUSAL_LM", **values)
    except (ValueError, TypeError, ImportError) as error:
        raise refusal(error, "adapter.*") from error


def reads_weights(config: AdapterConfig) -> bool:
    """Whether the adapter's first values may depend on the model's weights; if so, these need their final dtype."""
    if not config.is_used or config.path is not None:
        return False
    start = config.arguments.get("init_lora_weights", True)
    return str(config.type).upper() != "LORA" or config.dora or start not in _BLIND_STARTS


def refusal(error: Exception, where: str, hint: str | None = None) -> ConfigError:
    """Turn an exception of PEFT into a ConfigError about the key `where`."""
    text = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"PEFT refuses the adapter: {text[:300]}", where=where, hint=hint)


def _saved_config(path: str) -> PeftConfig:
    """Read the config of the adapter saved at `path`, a folder or Hub id, as one to be trained."""
    from peft import PeftConfig

    with reading_from_hub("adapter.path", path):
        # This fails if there is no safetensors file, so that PEFT never reads a pickle instead.
        cached_file(path, WEIGHTS)
        peft_config = PeftConfig.from_pretrained(path)
        kind = str(peft_config.peft_type.value)
        peft_config.inference_mode = False
    _find_type(kind, where="adapter.path")
    return peft_config


def saved_files(path: str) -> dict[str, Path]:
    """Give the two files of the adapter saved at `path`, a folder or Hub id, by name; they are downloaded if needed."""
    with reading_from_hub("adapter.path", path):
        return {name: Path(str(cached_file(path, name))) for name in (_CONFIG, WEIGHTS)}


def _find_type(name: str, *, where: str = "adapter.type") -> PeftType:
    """Give PEFT's enum value for the name of a type.

    Raises:
        ConfigError: PEFT has none of that name, or it cannot be trained here.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value.lower(): kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    usable = sorted(type_name for type_name, kind in known.items() if _reason_against(kind) is None)
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
    """Say why a type of adapter cannot be trained here; None: it can."""
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


def _check_arguments(config: AdapterConfig, type_name: str, class_name: str, fields: set[str]) -> None:
    """Refuse arguments that have a key of their own, and those that PEFT's class for the type has no field for."""
    ours = {name.format(type=type_name): key for key, names in _FIELDS.items() for name in names}
    for name, value in config.arguments.items():
        where = f"adapter.arguments.{name}"
        if name in ours or name in _SET_HERE:
            what = "hfdist sets this field itself, from its own keys"
            key = "targets" if name == "target_modules" else ours.get(name, "*")
            raise ConfigError(what, where=where, found=value, hint=f"set adapter.{key} instead")
        if name not in fields:
            what = f"PEFT's {class_name} has no such field"
            hint = nearest(name, fields, f"adapter.arguments.{{}}={value}")
            raise ConfigError(what, where=where, found=value, allowed=f"a field of {class_name}", hint=hint)


def check_peft_config(peft_config: Any, layout: Partitioning, *, where: str, field: str, hint: str) -> None:
    """Refuse methods and fields by which training would be another here, or in this layout.

    Args:
        peft_config: a `peft.PeftConfig`.
        layout: how the model is partitioned.
        where: the key or argument that gave the config, for messages.
        field: the key or argument under which its fields are named, for messages.
        hint: a config that can be trained.

    Raises:
        ConfigError: the type, a field or the first weights cannot be trained here, or not in this layout.
    """
    kind = peft_config.peft_type
    reason = _reason_against(kind)
    if reason is not None:
        what = f"this type cannot be trained here: {reason}"
        raise ConfigError(what, where=where, found=kind.value.lower(), hint=hint)
    for name, reason in _REFUSED_FIELDS.items():
        value = getattr(peft_config, name, None)
        if value is not None:
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
    if trains_tokens and layout.sharing_keys:
        name = "token_indices" if kind.value == "TRAINABLE_TOKENS" else "trainable_token_indices"
        what = "PEFT writes trained tokens into the whole embedding, of which ranks have parts in this layout"
        found = f"{kind.value.lower()}, with {layout.sharing_keys}"
        hint = "strategy=ddp or strategy=zero2, of one stage"
        raise ConfigError(what, where=f"{field}.{name}", found=found, hint=hint)


def _translate(config: AdapterConfig, type_name: str, fields: set[str]) -> dict[str, object]:
    """Give the keys of `adapter` that are not at their default as values of PEFT's `fields`, by the field's name."""
    default, values = AdapterConfig(), {}
    for key, names in _FIELDS.items():
        value = getattr(config, key)
        if value == getattr(default, key):
            continue
        candidates = [name.format(type=type_name) for name in names]
        found = next((name for name in candidates if name in fields), None)
        if found is None:
            raise ConfigError(
                "this type of adapter has nothing of the kind",
                where=f"adapter.{key}",
                found=f"{value}, with adapter.type={type_name}",
                allowed=str(getattr(default, key)).lower().replace("none", "null"),
                hint=f"adapter=none adapter.type={type_name} sets nothing but the type",
            )
        values[found] = value
    return values
