"""YAML documents for people: scripts as blocks of lines, no aliases, keys in their order, and none without a value."""

from __future__ import annotations

from collections.abc import Mapping

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, which are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _mapping(dumper: yaml.SafeDumper, mapping: dict[str, object]) -> yaml.MappingNode:
    return dumper.represent_dict({key: value for key, value in mapping.items() if value is not None})


_Dumper.add_representer(str, _text)
_Dumper.add_representer(dict, _mapping)


def to_documents(*documents: Mapping[str, object]) -> str:
    """Write documents one after the other, without keys whose value is None."""
    parts = (
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True) for document in documents
    )
    return "---\n".join(parts)
