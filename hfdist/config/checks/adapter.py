"""What the keys `adapter.*` must satisfy together, before PEFT or torch are loaded."""

from __future__ import annotations

import dataclasses

from hfdist.config.adapter import ALL_LINEAR, AdapterConfig
from hfdist.errors import ConfigError

# What a saved adapter does not say itself.
_BESIDE_A_PATH = ("path", "merge")


def check_adapter_keys(adapter: AdapterConfig) -> None:
    """Check the keys of an adapter against each other.

    Raises:
        ConfigError: the first contradiction.
    """
    if not adapter.is_used:
        _check_unused(
            adapter, _changed(adapter, but=("merge",)), "without an adapter this key has no meaning", "adapter=lora"
        )
        return
    if adapter.path is not None:
        _check_unused(adapter, _changed(adapter, but=_BESIDE_A_PATH), "the saved adapter says this itself", None)
    if adapter.target_pattern is not None and adapter.targets != [ALL_LINEAR]:
        raise ConfigError(
            "the layers to adapt are given twice",
            where="adapter.targets, adapter.target_pattern",
            found=f"{adapter.targets} and {adapter.target_pattern}",
            hint="adapter.target_pattern=null",
        )
    if ALL_LINEAR in adapter.targets and len(adapter.targets) > 1:
        raise ConfigError(
            f"{ALL_LINEAR} stands for all layers, so it stands alone",
            where="adapter.targets",
            found=adapter.targets,
            hint=f"adapter.targets=[{ALL_LINEAR}], or names of layers only",
        )
    if not adapter.targets:
        raise ConfigError(
            "no layer is to be adapted", where="adapter.targets", found="[]", hint=f"adapter.targets=[{ALL_LINEAR}]"
        )


def _changed(adapter: AdapterConfig, *, but: tuple[str, ...]) -> list[str]:
    default = AdapterConfig()
    names = [field.name for field in dataclasses.fields(adapter) if field.name not in but]
    return [name for name in names if getattr(adapter, name) != getattr(default, name)]


def _check_unused(adapter: AdapterConfig, names: list[str], what: str, hint: str | None) -> None:
    if names:
        raise ConfigError(
            what,
            where=f"adapter.{names[0]}",
            found=getattr(adapter, names[0]),
            allowed=str(getattr(AdapterConfig(), names[0])),
            hint=hint,
        )
