"""YAML documents for people: scripts as blocks of lines, no aliases, keys in their given order."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from hfdist.config.plain_values import without_nulls


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, which are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_documents(*documents: Mapping[str, object]) -> str:
    """Write documents one after the other, without keys whose value is None."""
    parts = (
        yaml.dump(without_nulls(document), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
        for document in documents
    )
    return "---\n".join(parts)
