"""Checks `adapter.*`, and what goes with quantized weights."""

from __future__ import annotations

import dataclasses
import json

from hfdist.config.checks.conflict import conflict
from hfdist.config.model import ALL_LINEAR, AdapterConfig
from hfdist.config.run import RunConfig
from hfdist.config.schema import plain
from hfdist.config.train import Precision
from hfdist.errors import ConfigError
from hfdist.topology import PARTS


def check_adapter(config: RunConfig) -> None:
    """Raise a ConfigError on keys without an adapter, and on layouts that quantized weights do not go with."""
    adapter, default = config.adapter, AdapterConfig()
    if adapter.path is not None or not adapter.is_used:
        what = (
            "a saved adapter has its own value of this key"
            if adapter.is_used
            else "without an adapter this key has no meaning"
        )
        for name in (field.name for field in dataclasses.fields(adapter)):
            kept = ("path", "merge", "quantization") if adapter.is_used else ("path", "merge")
            if name not in kept and getattr(adapter, name) != getattr(default, name):
                allowed, hint = json.dumps(plain(getattr(default, name))), "adapter=lora"
                if adapter.is_used:
                    is_option = name == "type"
                    hint = f"adapter=none adapter.path={adapter.path}" if is_option else f"adapter.{name}={allowed}"
                raise conflict(config, f"adapter.{name}", what, allowed=allowed, hint=hint)
    if adapter.target_pattern is not None and adapter.targets != [ALL_LINEAR]:
        what, where = "the layers to adapt are given twice", "adapter.targets, adapter.target_pattern"
        found = f"{adapter.targets} and {adapter.target_pattern}"
        raise ConfigError(what, where=where, found=found, hint="adapter.target_pattern=null")
    if ALL_LINEAR in adapter.targets and len(adapter.targets) > 1:
        what = f"{ALL_LINEAR} stands for all layers, so no name goes with it"
        hint = f"adapter.targets=[{ALL_LINEAR}], or names of layers only"
        raise conflict(config, "adapter.targets", what, hint=hint)
    if not adapter.targets:
        raise conflict(config, "adapter.targets", "no layer is to be adapted", hint=f"adapter.targets=[{ALL_LINEAR}]")
    if adapter.quantization is not None:
        _check_quantization(config)


def _check_quantization(config: RunConfig) -> None:
    """Check what weights of 4 bits go with."""
    adapter, strategy = config.adapter, config.strategy
    if (adapter.type or "lora").lower() != "lora" or adapter.dora:
        what = "this adapter looks at the weights that it stands beside, and they are in 4 bits"
        keys = "adapter.quantization adapter.type adapter.dora"
        hint = "adapter.type=lora adapter.dora=false, or adapter.quantization=null"
        raise conflict(config, keys, what, allowed="null, or LoRA without DoRA", hint=hint)
    for axis in PARTS:
        if getattr(strategy, axis) > 1:
            what, hint = f"{axis} ranks have parts of weights, and packed ones are whole", f"strategy.{axis}=1"
            raise conflict(config, f"adapter.quantization strategy.{axis}", what, allowed="null", hint=hint)
    if config.train.precision is Precision.fp8:
        what, hint = "the same layers cannot be in float8, too", "train.precision=bf16"
        raise conflict(config, "adapter.quantization train.precision", what, allowed="null", hint=hint)
