"""Checks `adapter.*`, and the layouts that adapters and quantized weights go with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection

from hfdist.config.checks.conflict import conflict
from hfdist.config.model import ALL_LINEAR, AdapterConfig, AdapterPart
from hfdist.config.plain_values import plain
from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.errors import ConfigError

_TARGETS = ("targets", "target_pattern", "target_parts")
"""Keys of which one says which layers have an adapter."""


def check_adapter(config: RunConfig) -> None:
    """Raise a ConfigError on keys without an adapter, and on layouts that it or quantized weights do not go with."""
    adapter = config.adapter
    if not adapter.is_used:
        _check_defaults(config, ("path", "merge"), "without an adapter this key has no meaning")
    elif adapter.path is not None:
        _check_defaults(config, ("path", "merge", "quantization"), "a saved adapter has its own value of this key")
    _check_targets(config)
    if adapter.is_used and config.strategy.sequence:
        key = "type" if adapter.path is None else "path"
        what = "tensor ranks share no tokens beside an adapter in this version"
        hint = "strategy.sequence=false"
        raise conflict(config, f"strategy.sequence adapter.{key}", what, allowed="false", hint=hint)
    if adapter.target_parts is not None:
        _check_parts(config, adapter.target_parts)
    if adapter.quantization is not None:
        _check_quantization(config)


def _check_defaults(config: RunConfig, free: Collection[str], what: str) -> None:
    """Refuse values other than the defaults, but of the keys in `free`."""
    adapter, default = config.adapter, AdapterConfig()
    for name in (field.name for field in dataclasses.fields(adapter)):
        if name not in free and getattr(adapter, name) != getattr(default, name):
            allowed = json.dumps(plain(getattr(default, name)))
            if not adapter.is_used:
                hint = "adapter=lora"
            elif name == "type":
                hint = f"adapter=none adapter.path={adapter.path}"
            else:
                hint = f"adapter.{name}={allowed}"
            raise conflict(config, f"adapter.{name}", what, allowed=allowed, hint=hint)


def _check_targets(config: RunConfig) -> None:
    adapter, default = config.adapter, AdapterConfig()
    given = [name for name in _TARGETS if getattr(adapter, name) != getattr(default, name)]
    if len(given) > 1:
        what, where = "the layers to adapt are given twice", ", ".join(f"adapter.{name}" for name in given)
        found = " and ".join(json.dumps(plain(getattr(adapter, name))) for name in given)
        raise ConfigError(what, where=where, found=found, hint=" ".join(f"adapter.{name}=null" for name in given[1:]))
    if ALL_LINEAR in adapter.targets and len(adapter.targets) > 1:
        what = f"{ALL_LINEAR} stands for all layers, so no name goes with it"
        hint = f"adapter.targets=[{ALL_LINEAR}], or names of layers only"
        raise conflict(config, "adapter.targets", what, hint=hint)
    if not adapter.targets:
        raise conflict(config, "adapter.targets", "no layer is to be adapted", hint=f"adapter.targets=[{ALL_LINEAR}]")


def _check_parts(config: RunConfig, parts: Collection[AdapterPart]) -> None:
    """Check what an adapter beside certain parts of the blocks goes with."""
    if not parts:
        raise conflict(config, "adapter.target_parts", "no part is to be adapted", hint="adapter.target_parts=null")


def _check_quantization(config: RunConfig) -> None:
    """Check what weights of 4 bits go with."""
    adapter, strategy = config.adapter, config.strategy
    if (adapter.type or "lora").lower() != "lora" or adapter.dora:
        what = "this adapter looks at the weights that it stands beside, and they are in 4 bits"
        keys = "adapter.quantization adapter.type adapter.dora"
        hint = "adapter.type=lora adapter.dora=false, or adapter.quantization=null"
        raise conflict(config, keys, what, allowed="null, or LoRA without DoRA", hint=hint)
    if strategy.tensor > 1:
        what, hint = "tensor ranks have parts of matrices, and packed ones are whole", "strategy.tensor=1"
        raise conflict(config, "adapter.quantization strategy.tensor", what, allowed="null", hint=hint)
    if config.train.precision is Precision.fp8:
        what, hint = "the same layers cannot be in float8, too", "train.precision=bf16"
        raise conflict(config, "adapter.quantization train.precision", what, allowed="null", hint=hint)
