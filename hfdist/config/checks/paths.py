"""Paths of a config that lead nowhere, or to something else than their key means."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.config.data import SourceConfig, SourceKind
from hfdist.config.override_text import in_shell
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, nearest
from hfdist.messages.message import MOST_BYTES, NotAMessageError, read_json
from hfdist.records.run_folder import RunFolder

_SUFFIXES = re.compile(r"(\.(jsonl?|ndjson|csv|tsv|txt|md|parquet|arrow|feather|ya?ml|gz|zst|bz2|xz|gguf))+$")
"""What a name of a file may end with, though another one is meant."""


def check_paths(config: RunConfig) -> None:
    """Raise a ConfigError where data, the model or the run's folder cannot be where the config says."""
    for key, source in config.data.all_sources.items():
        _check_source(f"{key}.path", source)
    system = config.data.chat.system
    if system is not None and os.path.isfile(os.path.expanduser(system)):
        what, allowed = "this is the name of a file", "the text of the system message, such as that of the file"
        raise ConfigError(what, where="data.chat.system", found=system, allowed=allowed)
    check_model_paths(config)
    _check_writable("run.dir", config.run.dir)


def check_model_paths(config: RunConfig) -> None:
    """Raise a ConfigError where the model, its tokenizer, an adapter or a reward model is a path that leads nowhere."""
    for key, name in (("model.name", config.model.name), ("model.tokenizer.name", config.model.tokenizer.name)):
        if name is not None:
            _check_name(key, name)
    if config.model.name:
        _check_model_folder(config.model.name)
    _check_adapter_path(config.adapter.path)
    for key, path in (("task.reward_model", config.task.reward_model), ("task.teacher", config.task.teacher)):
        if path is not None and not os.path.isdir(os.path.expanduser(path)):
            what, allowed = "there is no such folder", "the folder of a model"
            hint = _near(key, path) or f"{key}=RUN/model, or the folder that `hf download` prints"
            raise ConfigError(what, where=key, found=path, allowed=allowed, hint=hint)


def _check_name(key: str, name: str) -> None:
    """Refuse a name that is neither there nor an id of the Hub, which has one slash at the most."""
    if not os.path.exists(os.path.expanduser(name)) and (_is_local(name) or name.count("/") > 1):
        what, allowed = "there is no such folder", "a Hub id, a folder, or a .gguf file"
        of_mirror = "docs/checkpoints.md brings the checkpoint of a mirror to this machine"
        hint = _near(key, name) if scheme_of(name) is None else of_mirror
        raise ConfigError(what, where=key, found=redact(name), allowed=allowed, hint=hint)


def _check_model_folder(name: str) -> None:
    """Refuse a file of a model, the folder of an adapter, and that of a run, in place of a model's folder."""
    full = os.path.expanduser(name)
    if os.path.isfile(full) and not name.endswith(".gguf"):
        what, folder = "a model is a folder, with its config.json", os.path.dirname(name) or "."
        is_model = os.path.isfile(os.path.join(os.path.dirname(full), "config.json"))
        hint = in_shell("model", folder) if is_model else None
        raise ConfigError(what, where="model.name", found=name, allowed="a Hub id, a folder, a .gguf file", hint=hint)
    _check_no_adapter(name)
    if os.path.isfile(f"{full}/model/config.json") and not os.path.isfile(f"{full}/config.json"):
        what, hint = "this is the folder of a run; its model is in it", in_shell("model", f"{name.rstrip('/')}/model")
        raise ConfigError(what, where="model.name", found=name, hint=hint)


def _check_no_adapter(name: str) -> None:
    """Refuse the folder of an adapter as the model: its base would be trained without it."""
    full = Path(os.path.expanduser(name))
    path = full / "adapter_config.json"
    if not os.path.isfile(path) or os.path.isfile(full / "config.json"):
        return
    base = None
    with contextlib.suppress(OSError, NotAMessageError):
        with path.open("rb") as file:
            found = read_json(file.read(MOST_BYTES + 1))
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    what = "this is the folder of an adapter, and no model"
    # It may be anybody's text.
    is_name = isinstance(base, str) and re.fullmatch(r"[\w./~-]+", base, re.ASCII)
    hint = f"model={base if is_name else 'ID'} {in_shell('adapter.path', name)}"
    raise ConfigError(what, where="model.name", found=name, hint=hint)


def _check_adapter_path(path: str | None) -> None:
    if path is None or not (_is_local(path) or path.count("/") > 1 or os.path.isdir(path)):
        return
    key, full = "adapter.path", Path(os.path.expanduser(path))
    if not os.path.isfile(full / "adapter_config.json"):
        what = "the folder has no adapter" if os.path.isdir(full) else "there is no such folder"
        allowed = "a folder with adapter_config.json, or a Hub id"
        instead = f"{in_shell('model', path)}, without an adapter.path"
        hint = instead if os.path.isfile(full / "config.json") else _near(key, path)
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint=hint)


def _check_source(key: str, source: SourceConfig) -> None:
    path = source.path
    if path is None or scheme_of(path) is not None:
        return
    full = os.path.expanduser(path)
    if source.kind is SourceKind.hub and os.path.isfile(full):
        what, allowed = "this is a file, and no dataset of the Hub", "OWNER/NAME"
        raise ConfigError(
            what, where=key, found=path, allowed=allowed, hint=f"{in_shell('data', path)}, in place of data=hub"
        )
    if source.kind is SourceKind.hub and not _is_local(path):
        return
    # Only the part before "**": links below may form a circle. data/ looks further.
    start = full.partition("**")[0] or "."
    if not os.path.lexists(full) and not any(glob.iglob(start)):
        allowed = "a file, a folder, or a glob (quote it)" if source.kind is SourceKind.files else "a folder"
        raise ConfigError("no file is there", where=key, found=path, allowed=allowed, hint=_near(key, path))
    if source.kind is SourceKind.tokens and os.path.isfile(full):
        what, allowed = "token files are a folder", "a folder that hfdist pretokenize has written"
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint="data=FILE for a file of text")
    if source.kind is SourceKind.files and os.path.isfile(RunFolder(Path(full)).record):
        what, model = "this is the folder of a run, and not one of data", in_shell("model", f"{path.rstrip('/')}/model")
        raise ConfigError(what, where=key, found=path, hint=f"data=FILE; its model is {model}")
    if source.kind is SourceKind.files and os.path.isfile(os.path.join(full, "00000.tokens")):
        tokenizer = in_shell("model.tokenizer.name", f"{path.rstrip('/')}/tokenizer")
        words = f"data=tokens {in_shell('data.sources.tokens.path', path)} {tokenizer}"
        what = "this is a folder of token files"
        raise ConfigError(what, where=key, found=path, hint=f"{words}, in place of it")


def _is_local(name: str) -> bool:
    """Whether a name is a path, and no Hub id."""
    return name.startswith((".", "/", "~"))


def mixture_hint(files: Iterable[str]) -> str:
    """Say how several files are given, of which each is to be read."""
    sources = (in_shell(f"+data.sources.part{number}", {"path": file}) for number, file in enumerate(files, 1))
    return f"data=mixture {' '.join(sources)}, or a folder or a glob that holds them"


def _near(key: str, path: str) -> str | None:
    """Give what is in the same folder under a similar name; of several files with commas, how they are given."""
    files = [part.strip() for part in path.strip("[]").split(",")]
    if key.startswith("data.") and len(files) > 1 and all(os.path.lexists(os.path.expanduser(file)) for file in files):
        return mixture_hint(files)
    if key == "data.sources.files.path" and re.fullmatch(r"[\w-][\w.-]*/[\w-]+", path):
        return f"data=hub data.sources.hub.path={path}"
    full = Path(os.path.expanduser(path))
    try:
        names = [other.name for other in full.parent.iterdir()]
    except OSError:
        return None
    # A common suffix makes no names alike.
    by_stem = {_SUFFIXES.sub("", name): name for name in names if name != full.name}
    near = nearest(_SUFFIXES.sub("", full.name), by_stem, cutoff=0.75)
    return None if near is None else in_shell(key, str(Path(path).with_name(by_stem[near])))


def _check_writable(key: str, folder: str) -> None:
    """Make a folder in the first part of the path that is there: permissions alone do not tell, as of root in /proc."""
    path = Path(folder).absolute()
    there = next(part for part in (path, *path.parents) if os.path.lexists(part))
    try:
        with contextlib.suppress(FileNotFoundError):
            # A name may be too long for any folder.
            os.lstat(path)
        with tempfile.TemporaryDirectory(prefix=".hfdist-", dir=there):
            pass
    except (OSError, ValueError) as error:  # of a name with a NUL, a ValueError
        reason = f"the folder cannot be used: {getattr(error, 'strerror', None) or error}"
        what = "a file is in the folder's place" if os.path.isfile(there) else reason
        allowed, hint = "a writable folder", "run.dir=runs/first"
        raise ConfigError(what, where=key, found=folder, allowed=allowed, hint=hint) from error
