"""Paths on the command line in place of options: `data=FILES`, `model=FOLDER`, and a DeepSpeed config file."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hfdist.config.checks.deepspeed import PLACE, read_deepspeed_file
from hfdist.config.checks.paths import mixture_hint
from hfdist.config.conf_folder import groups_with, list_options, shipped_folder
from hfdist.config.override_text import ALLOWED, COMMAND_LINE, as_override
from hfdist.errors import ConfigError
from hfdist.records.run_folder import is_run_folder

PATH_KEYS = {"data": "data.sources.files.path", "model": "model.name"}
"""Groups that take a path in place of an option, and the key that then has the path."""
_PATH_OPTIONS = {"data": "files", "model": "hub"}
"""The options of these groups that read the path."""
_PATH_PATTERNS = {"data": re.compile(r"[/*?\\]|\.\w"), "model": re.compile(r"^[^,]*/[^,]*$|\.gguf$")}
"""What tells a path from an option. Several models with commas are none: only a sweep takes these."""
_OF_MODELS = ("config.json", "adapter_config.json", "tokenizer.json", "model.safetensors")
"""Files of which a folder of a model has one."""


def refuse_second_data(texts: Sequence[str]) -> None:
    """Refuse `data=FILE` twice: the last one would win, as of any key, but who names two files wants both."""
    files = [text.removeprefix("data=").strip("\"'") for text in texts if text.startswith("data=")]
    if len({*files}) > 1 and all(_PATH_PATTERNS["data"].search(file) for file in files):
        where, hint = f"data ({COMMAND_LINE})", mixture_hint(dict.fromkeys(files))
        raise ConfigError("files are given twice", where=where, found=" ".join(files), hint=hint)


def refuse_bare_paths(texts: Sequence[str]) -> None:
    """Refuse files and folders that stand alone: a model or data is probably meant."""
    bare = [text for text in texts if "=" not in text and os.path.exists(text) and not is_run_folder(text)]
    if not bare or any(text.endswith((".yaml", ".yml")) or groups_with(shipped_folder(), text) for text in bare):
        return
    models = [text for text in bare if _is_model(text)]
    files = [text for text in bare if text not in models]
    hints = [shlex.quote(f"model={text if '/' in text else f'./{text}'}") for text in models[:1]]
    if files:
        one = files[0] if "/" in files[0] else f"./{files[0]}"
        hints.append(shlex.quote(f"data={one}") if len(files) == 1 else mixture_hint(files))
    hint = " ".join(hints)
    raise ConfigError("this is not an override", where=COMMAND_LINE, found=" ".join(bare), allowed=ALLOWED, hint=hint)


def in_yaml(key: str, value: object) -> str:
    """Write a key with dots as a file has it: `train: {max_steps: 2}`."""
    first, *names = key.split(".")
    nested = str(value)
    for name in reversed(names):
        nested = f"{{{name}: {nested}}}"
    return f"{first}: {nested}"


def hint_for_file(key: str, value: str) -> str | None:
    """Say what a file has in place of a path that the command line takes for a group; None: it is no path of one."""
    if key not in PATH_KEYS or not _PATH_PATTERNS[key].search(value):
        return None
    several = re.findall(r"'([^']+)'", value) if value.startswith("[") else []
    if several and key == "data":
        parts = ", ".join(f"part{number}: {{path: {file}}}" for number, file in enumerate(several, 1))
        return f"`data: {{sources: {{{parts}}}}}`, and `- override /data: mixture` in the defaults list"
    return f"`{in_yaml(PATH_KEYS[key], value)}`, and `- override /{key}: {_PATH_OPTIONS[key]}` in the defaults list"


def write_paths_out(text: str, folders: Sequence[Path]) -> list[str]:
    """Give the overrides that one with a path stands for: an option and the key of the path, or a DeepSpeed config.

    One without a path is given as it is.
    """
    key, _, value = text.partition("=")
    if key.lstrip("+") == PLACE and value.endswith(".json"):
        where = f"{PLACE} ({COMMAND_LINE})"
        return [as_override(PLACE, read_deepspeed_file(value, where))]
    if key not in PATH_KEYS or not (_PATH_PATTERNS[key].search(value) or _is_there(key, value, folders)):
        return [text]
    path = value.strip("\"'").replace("'", "\\'")
    return [f"{key}={_PATH_OPTIONS[key]}", f"{PATH_KEYS[key]}='{path}'"]


def _is_there(group: str, name: str, folders: Sequence[Path]) -> bool:
    """Whether a name without a slash is that of a file or folder here, and of no option."""
    is_one = bool(name) and (_is_model(name) if group == "model" else os.path.exists(name))
    return is_one and not any(name in list_options(folder, group) for folder in folders)


def _is_model(path: str) -> bool:
    return path.endswith(".gguf") or any(os.path.exists(os.path.join(path, name)) for name in _OF_MODELS)
