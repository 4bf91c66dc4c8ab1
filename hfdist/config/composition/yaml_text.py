"""Plain values as YAML that config files are read from, written by libyaml where PyYAML has it: ten times sooner."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from yaml import SafeDumper as _FastDumper
else:
    _FastDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote each text that reads as a number: `1e-3` is one in config files, though not by PyYAML's own rules."""
    style = None
    with suppress(ValueError):
        float(text)
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


class _Dumper(_FastDumper):
    """Writes by libyaml, where PyYAML has it."""


class _PlainDumper(yaml.SafeDumper):
    """Writes a path that is not UTF-8, which libyaml refuses."""


for _kind in (_Dumper, _PlainDumper):
    _kind.add_representer(str, _represent_text)


def to_yaml_text(values: object) -> str:
    """Write plain values, in their order, a long text in one line."""
    with suppress(UnicodeEncodeError):
        return _dump(values, _Dumper)
    return _dump(values, _PlainDumper)


def _dump(values: object, dumper: type[yaml.SafeDumper]) -> str:
    return yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=1000)
