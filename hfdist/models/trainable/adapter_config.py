"""The config of an adapter: ours checked against PEFT and made into PEFT's, before there is any model."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from typing import Any

from transformers.utils.hub import cached_file

from hfdist.config.adapter import ALL_LINEAR, AdapterConfig
from hfdist.config.model import Init, ModelConfig
from hfdist.errors import ConfigError
from hfdist.models.hub.client import reading_from_hub

# PEFT is imported where an adapter is asked for: that takes a second.

WEIGHTS = "adapter_model.safetensors"

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

# Our keys, and what PEFT's classes call them.
_FIELDS = {
    "rank": ("r",),
    "alpha": ("lora_alpha", "alpha", "{type}_alpha"),
    "dropout": ("lora_dropout", "{type}_dropout", "module_dropout"),
    "rslora": ("use_rslora",),
    "dora": ("use_dora",),
    "modules_to_save": ("modules_to_save",),
}
# Values of init_lora_weights; all but the first three look at the model's weights.
_STARTS = (True, False, "gaussian", "pissa", "olora", "orthogonal", "mica")
_SET_HERE = ("target_modules", "task_type", "inference_mode", "peft_type", "base_model_name_or_path", "revision")


def check_adapter(config: AdapterConfig, model: ModelConfig) -> None:
    """Check `adapter.*` against PEFT, before anything is built; without an adapter, load nothing.

    Raises:
        ConfigError: a type, an argument or a value that PEFT does not take, or a saved adapter that cannot be read.
    """
    if not config.is_used:
        return
    if config.merge and model.init is Init.random:
        raise ConfigError(
            "an adapter is merged into the weights of a pretrained model, and these are random",
            where="adapter.merge",
            found="true, with model.init=random",
            hint="model=hub model.name=ID, or adapter.merge=false",
        )
    make_peft_config(config)


def make_peft_config(config: AdapterConfig) -> Any:
    """Give the `peft.PeftConfig` that the keys ask for.

    Raises:
        ConfigError: as of `check_adapter`.
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
    if not (is_all and "feedforward_modules" in fields):
        # IA3 must be told which layers are feed-forward ones, and has PEFT's table of models for that.
        values["target_modules"] = config.target_pattern or (ALL_LINEAR if is_all else list(config.targets))
    try:
        return config_class(task_type="CAUSAL_LM", **values)
    except (ValueError, TypeError, ImportError) as error:
        raise refusal(error, "adapter.*") from error


def reads_weights(config: AdapterConfig) -> bool:
    """Whether the adapter's first values may depend on the model's weights, which then must have their final type."""
    if not config.is_used or config.path is not None:
        return False
    start = config.arguments.get("init_lora_weights", True)
    return str(config.type).upper() != "LORA" or config.dora or start not in _STARTS[:3]


def refusal(error: Exception, where: str) -> ConfigError:
    """Say what PEFT has raised about the key `where`."""
    text = " ".join(str(error).split()) or type(error).__name__
    hint = None
    if importlib.util.find_spec("bitsandbytes") is None and "bitsandbytes" in text:
        hint = "quantized weights are not supported: model.dtype=bfloat16 is the least memory"
    return ConfigError(f"PEFT refuses the adapter: {text[:300]}", where=where, hint=hint)


def _saved_config(path: str) -> Any:
    from peft import PeftConfig

    with reading_from_hub("adapter.path", path):
        # The methods of the file, so that a pickle is never taken in its stead.
        cached_file(path, WEIGHTS)
        peft_config = PeftConfig.from_pretrained(path)
    _find_type(peft_config.peft_type.value, where="adapter.path")
    peft_config.inference_mode = False
    return peft_config


def _find_type(name: str, *, where: str = "adapter.type") -> Any:
    """Give PEFT's value of a type.

    Raises:
        ConfigError: PEFT has none of that name, or it cannot be trained here.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value.lower(): kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    usable = sorted(word for word, kind in known.items() if _reason_against(kind) is None)
    kind = known.get(name.lower())
    if kind is None:
        near = difflib.get_close_matches(name.lower(), usable, n=1, cutoff=0.5)
        hint = f"adapter.type={near[0]}" if near else "adapter=lora"
        raise ConfigError(
            "PEFT has no adapter of this type", where=where, found=name, allowed=", ".join(usable), hint=hint
        )
    reason = _reason_against(kind)
    if reason is not None:
        raise ConfigError(
            f"this type cannot be trained here: {reason}",
            where=where,
            found=name,
            allowed=", ".join(usable),
            hint="adapter=lora",
        )
    return kind


def _reason_against(kind: Any) -> str | None:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PromptLearningConfig

    if kind.value in _REFUSED:
        return _REFUSED[kind.value]
    config_class, tuner = PEFT_TYPE_TO_CONFIG_MAPPING[kind], PEFT_TYPE_TO_TUNER_MAPPING.get(kind)
    if issubclass(config_class, PromptLearningConfig) or "adapter_layers" in {
        field.name for field in dataclasses.fields(config_class)
    }:
        return "it learns a prompt, not weights in the model's layers"
    if tuner is None or tuner.uses_shared_state:
        return _SHARED
    return None


def _check_arguments(config: AdapterConfig, class_name: str, fields: set[str]) -> None:
    ours = {name: key for key, names in _FIELDS.items() for name in (n.format(type=config.type) for n in names)}
    for name, value in config.arguments.items():
        if name in ours or name in _SET_HERE:
            key = ours.get(name, "targets" if name == "target_modules" else "*")
            raise ConfigError(
                "hfdist sets this field itself, from its own keys",
                where=f"adapter.arguments.{name}",
                found=value,
                hint=f"set adapter.{key} instead",
            )
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            raise ConfigError(
                f"PEFT's {class_name} has no such field",
                where=f"adapter.arguments.{name}",
                found=value,
                allowed=f"a field of {class_name}",
                hint=f"adapter.arguments.{near[0]}={value}" if near else None,
            )
    _check_start(config.arguments.get("init_lora_weights", True))


def _check_start(start: Any) -> None:
    if start not in _STARTS:
        raise ConfigError(
            "first weights that need data beforehand, or that could not be made again when the adapter is opened",
            where="adapter.arguments.init_lora_weights",
            found=start,
            allowed=", ".join(str(known).lower() for known in _STARTS),
        )


def _translate(config: AdapterConfig, kind: str, fields: set[str]) -> dict[str, Any]:
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
