"""An option of a config group by its name, for Python: the values of its file in conf/, and of those it begins with."""

from __future__ import annotations

from typing import Any

from hfdist.config.composition.aliases import override_for_option
from hfdist.config.composition.files import read_config
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.errors import ConfigError, nearest


def read_preset(group: str, name: str, *, where: str) -> dict[str, Any]:
    """Give the values of a shipped option; ConfigError: there is none of this name."""
    known = list_options(shipped_folder(), group)
    if name not in known:
        # A file of conf/ may be named, too.
        stem = name.rpartition("/")[2].removesuffix(".yaml")
        called = (override_for_option(group, stem) or "").partition("=")[2]
        hint = f'"{called}"' if called in known else nearest(stem, known, '"{}"') or f'"{known[0]}"'
        raise ConfigError(f"there is no such {group}", where=where, found=name, allowed=", ".join(known), hint=hint)
    values = read_config(shipped_folder() / group / f"{name}.yaml")
    begins_with = values.pop("defaults", [])
    merged: dict[str, Any] = {}
    for other in begins_with:
        merged |= read_preset(group, other, where=where)
    return merged | values
