"""Plain values as YAML that config files are read from, written by libyaml where PyYAML has it: ten times sooner."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from yaml import SafeDumper as _FastDumper
else:
    _FastDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_FastDumper):
    """Quotes each text that reads as a number: `1e-3` is one in config files, though not by PyYAML's own rules."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None
    with suppress(ValueError):
        float(text)
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def to_yaml_text(values: object) -> str:
    """Write plain values, in their order, a long text in one line."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
