"""YAML that people can read: scripts as blocks of lines, keys in their order, no aliases, no keys without a value."""

from __future__ import annotations

from collections.abc import Mapping

import yaml


class _Dumper(yaml.SafeDumper):
    """A writer of YAML without aliases: an object that appears twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:
        """Whether an object gets no alias: so it is for all."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write a text of several lines as a block."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _mapping(dumper: yaml.SafeDumper, mapping: dict[str, object]) -> yaml.MappingNode:
    """Write a mapping without the keys whose value is None."""
    return dumper.represent_dict({key: value for key, value in mapping.items() if value is not None})


_Dumper.add_representer(str, _text)
_Dumper.add_representer(dict, _mapping)


def to_documents(*documents: Mapping[str, object]) -> str:
    """Give YAML documents as one text, without keys whose value is None, at any depth."""
    parts = (
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True) for document in documents
    )
    return "---\n".join(parts)
