"""A config file, read and checked before anything of it is used."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hfdist.config.composition.refused_values import check_pair
from hfdist.config.composition.yaml_graph import check_size, line_of, list_pairs, parse, refusing_yaml
from hfdist.errors import ConfigError

MAX_BYTES = 1 << 20
NUM_KEPT = 128
"""Files that are not parsed anew: a sweep composes hundreds of configs of the same ones."""
RUN_DEFAULTS = ("run_schema", "_self_")
"""The defaults list that a run writes into its config."""
_MAPPING = "a YAML mapping: `key: value` lines"


def read_config_text(path: Path) -> str:
    """Read a config file and check it.

    Raises:
        ConfigError: not readable, too big, no YAML mapping, or one that runs code, reads the environment or
            trusts remote code.
    """
    place = display(path)
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            found, allowed = f"{size_bytes} bytes", f"<= {MAX_BYTES} bytes"
            raise ConfigError("the config file is too big", where=place, found=found, allowed=allowed)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}", where=place) from error
    _check_text(text, place)
    return text


def read_config(path: Path) -> dict[str, Any]:
    """Give what a config file holds, with its references as text; ConfigError: see `read_config_text`."""
    text, place = read_config_text(path), display(path)
    with refusing_yaml(text, place):
        values: dict[str, Any] | None = _PlainLoader(text).get_single_data()
    return values or {}


def refuse_references(path: Path) -> None:
    """Refuse `${...}` in the config of a run, perhaps of somebody else's: what a run has written is resolved.

    References to references unfold to any size, of any file.
    """
    place = display(path)
    root = parse(read_config_text(path), place)
    for pair in list_pairs(root, place) if root is not None else ():
        key, value = pair.key, pair.value
        if pair.name == "defaults":
            listed = [item.value for item in value.value] if isinstance(value, yaml.SequenceNode) else value.value
            if listed != list(RUN_DEFAULTS):
                # Another file beside it could do what is refused below.
                what, allowed = "the config of a run is whole by itself", f"[{', '.join(RUN_DEFAULTS)}]"
                raise ConfigError(what, where=f"defaults ({line_of(key, place)})", found=str(listed), allowed=allowed)
        for node in (key, value):
            if isinstance(node, yaml.ScalarNode) and re.search(r"(?<!\\)(\\\\)*\$\{", node.value):
                what = "the config of a run has no references to other keys: they were resolved when it was written"
                where = f"{pair.name} ({line_of(node, place)})"
                hint = "the file as the run has written it"
                raise ConfigError(what, where=where, found=node.value, allowed=r"\${ for the text itself", hint=hint)


def display(path: Path) -> str:
    """Give a path as people read it: relative to the working folder, if it is below."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return str(path)


class _PlainLoader(yaml.SafeLoader):
    """Loads dates as the text that they are, as OmegaConf does."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # an attribute of PyYAML's
        first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@lru_cache(NUM_KEPT)
def _check_text(text: str, place: str) -> None:
    root = parse(text, place)
    if root is None and text.strip():
        # Comments alone: a preset that is different in nothing.
        return
    if root is None:
        hint = f"delete {place}, or begin a config with `defaults: [finetune, _self_]`"
        raise ConfigError("the config file is empty", where=place, allowed=_MAPPING, hint=hint)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("the config file is not a mapping", where=line_of(root, place), allowed=_MAPPING)
    check_size(root, place)
    for pair in list_pairs(root, place):
        check_pair(pair, place)
