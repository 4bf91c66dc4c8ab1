"""What is to be composed: a primary config, overrides, and the folders where both are looked for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.composition.files import display, read_config
from hfdist.config.composition.overrides import GivenOverride
from hfdist.config.conf_folder import list_groups, list_options
from hfdist.config.plain_values import flatten


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was to be composed."""

    config_name: str
    overrides: Sequence[GivenOverride]
    folders: tuple[Path, ...]
    """Searched in this order."""

    def groups(self) -> dict[str, list[str]]:
        """Give every group with its options, over all folders."""
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            for group in list_groups(folder):
                found.setdefault(group, set()).update(list_options(folder, group))
        return {group: sorted(options) for group, options in found.items()}

    def file(self, config_path: str) -> Path | None:
        """Give the file of an option such as `optimizer/adamw`; None: there is none."""
        paths = (folder / f"{config_path.removesuffix('.yaml')}.yaml" for folder in self.folders)
        # Not by pathlib: Python 3.11 raises for a name that is too long.
        return next((path for path in paths if os.path.isfile(path)), None)

    def value_of(self, key: str) -> str | None:
        """Give what the command line sets a key or group to; None: it does not."""
        return next((given.value_text for given in self.overrides if given.key.partition("@")[0] == key), None)

    def value_in_file(self, key: str) -> object:
        """Give what the primary config has for a key; None: nothing, or it is hfdist's own."""
        path = self.file(self.config_name)
        return None if path is None else dict(flatten(read_config(path), "")).get(key)

    def place_named(self, message: str, key: str = "") -> str | None:
        """Name the file that a message of Hydra names, with the line of `key` where that is certain; None: no file."""
        named = re.search(r"\b[Ii]n '?([\w./-]+?)'?(?=[:,])", message)
        path = self.file(named[1]) if named else None
        if path is None:
            return None
        leaf = re.escape(key.rpartition(".")[2])
        lines = path.read_text(encoding="utf-8").splitlines()
        hits = [number for number, line in enumerate(lines, 1) if leaf and re.match(rf"\s*(- )?{leaf}\s*:", line)]
        return f"{display(path)}, line {hits[0]}" if len(hits) == 1 else display(path)
