"""Brings a model to this machine: a Hub repository, a folder or a GGUF file becomes a folder that is verified."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import CONFIG_MAPPING

from hfdist.config.model import Init, ModelConfig, TokenizerConfig
from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError
from hfdist.models.gguf import convert_gguf
from hfdist.models.hub_client import FETCH_FIRST
from hfdist.models.hub_repository import Repository, Snapshot

_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of names of configs, tokenizers, chat templates, and the index of the weights."""
_TEMPLATES = "additional_chat_templates/"
"""Folder of further chat templates."""
_POOLING = "1_Pooling/"
"""Folder in which sentence-transformers says how states become an embedding."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Ends of names of files that may run code when they are opened."""
_WHILE_CONNECTED = "fetch it with `hf download` while connected"


def _do_nothing() -> None:
    """Stand for a download where there is nothing to fetch."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model's config and tokenizer on this machine, and its weights once they are asked for."""

    model: ModelConfig
    """The run's config of the model, with local folders as names."""
    fetch_weights: Callable[[], object] = field(default=_do_nothing, repr=False)
    """Downloads the weights, unless they are here. Call it before there is a process group, in which others would wait.
    A ConfigError says that the Hub does not give them, a ResourceError that it is not reached or the disk is full."""


def resolve_model(config: ModelConfig, *, cache_dir: Path) -> ResolvedModel:
    """Find the model and the tokenizer, and bring their small files here.

    A branch or tag is resolved once, so that config, tokenizer and weights are of one commit.

    Args:
        config: names a Hub repository, a folder or a GGUF file, for the model and for the tokenizer; or none for one of
            them, or both.
        cache_dir: folder of converted GGUF files and notes of what was verified. Downloads go to the Hub's own cache.

    Raises:
        ConfigError: no such model, no access, pickles instead of safetensors, code of its own, or missing files.
        ResourceError: the Hub does not answer, or the disk is full.
    """
    if config.name is None:
        return ResolvedModel(replace(config, tokenizer=resolve_tokenizer(config, cache_dir=cache_dir)))
    source = _Source(config.name, config.revision, config.gguf_file, key="model.name", is_model=True)
    found = _find(config, source, cache_dir)
    folder = str(found.folder)
    if _has_the_models_name(config):
        tokenizer = replace(config.tokenizer, name=folder, revision=None)
    else:
        tokenizer = resolve_tokenizer(config, cache_dir=cache_dir)
    model = replace(config, name=folder, revision=None, gguf_file=None, tokenizer=tokenizer)
    return ResolvedModel(model, found.fetch_weights)


def resolve_tokenizer(config: ModelConfig, *, cache_dir: Path) -> TokenizerConfig:
    """Find the tokenizer alone, and bring its files here. One that is trained on the corpus stays as it is.

    Args:
        config: names the tokenizer's Hub repository, folder or GGUF file.
        cache_dir: folder of converted GGUF files and notes of what was verified.

    Raises:
        ConfigError: no such repository or folder, no access, or a damaged GGUF file.
        ResourceError: the Hub does not answer, or the disk is full.
    """
    tokenizer = config.tokenizer
    if tokenizer.name is None:
        return tokenizer
    gguf_file = config.gguf_file if _has_the_models_name(config) else None
    source = _Source(tokenizer.name, tokenizer.revision, gguf_file, key="model.tokenizer.name", is_model=False)
    return replace(tokenizer, name=str(_find(config, source, cache_dir).folder), revision=None)


def _has_the_models_name(config: ModelConfig) -> bool:
    """Whether model and tokenizer are named alike, so that the model's folder has the tokenizer, too."""
    name, revision = config.tokenizer.name, config.tokenizer.revision
    if name is None or config.name is None or revision != config.revision:
        return False
    return expand_user(name) == expand_user(config.name)


def list_files(config: ModelConfig, folder: Path) -> list[str]:
    """List the names of the files that make a model: the small ones, and its weights if the run reads them.

    Args:
        config: the run's config of the model.
        folder: the model's folder on this machine.

    Raises:
        ConfigError: some of the files are missing.
    """
    names = _list_names(folder)
    weights = _check_model(config, names, folder, str(folder), is_complete=True)
    return sorted({*weights, *(name for name in names if name.endswith(_SMALL))})


def _list_names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.is_file()}


@dataclass(frozen=True)
class _Source:
    """What a config names: the place of a model, or that of a tokenizer alone."""

    name: str
    """A Hub id, a folder or a GGUF file."""
    revision: str | None
    gguf_file: str | None
    """Name of a GGUF file in the repository or folder."""
    key: str
    """The config key that gives the name, for messages."""
    is_model: bool
    """False: only the files of the tokenizer are looked for."""


@dataclass(frozen=True)
class _Found:
    """A source on this machine."""

    folder: Path
    """Folder of the small files, or of a converted GGUF file."""
    fetch_weights: Callable[[], object] = _do_nothing
    """Downloads the weights into the folder, unless they are there."""


def _find(config: ModelConfig, source: _Source, cache_dir: Path) -> _Found:
    """Bring the small files of a source here, and check them."""
    name = source.name
    # Methods of Path would raise an OSError for a name that is too long.
    if name.endswith(".gguf") or os.path.exists(expand_user(name)) or name.startswith((".", "/", "~")):
        return _Found(_find_here(config, source, cache_dir))
    repository = Repository(name, source.key, cache_dir)
    snapshot = repository.resolve(source.revision)
    if source.gguf_file is not None:
        _require(snapshot, source.gguf_file, name, key="model.gguf_file")
        file = repository.fetch(snapshot, [source.gguf_file]) / source.gguf_file
        return _Found(convert_gguf(file, cache_dir, key=source.key))
    if source.is_model:
        if "config.json" not in snapshot.names and not {_SINGLE, _INDEX} & snapshot.names:
            # This error says more than that there is no config: that it is an adapter, for one, or GGUF.
            raise _without_weights(snapshot.names, name, snapshot.is_complete)
        _require(snapshot, "config.json", name, key=source.key)
    folder = repository.fetch(snapshot, _small_files(snapshot.names, trusts_code=config.trust_remote_code))
    if not source.is_model:
        return _Found(folder)
    weights = _check_model(config, snapshot.names, folder, name, is_complete=snapshot.is_complete)
    return _Found(folder, lambda: repository.fetch(snapshot, weights))


def _small_files(names: Set[str], *, trusts_code: bool) -> list[str]:
    """List a repository's files besides weights that transformers may read; code only where the user trusts it."""
    suffixes = (*_SMALL, ".py") if trusts_code else _SMALL
    at_top = [name for name in names if "/" not in name or name.startswith((_TEMPLATES, _POOLING))]
    return [name for name in at_top if name.endswith(suffixes)]


def _find_here(config: ModelConfig, source: _Source, cache_dir: Path) -> Path:
    """Give the folder of a source that is on this machine, checked; a GGUF file is converted."""
    path, key = expand_user(source.name), source.key
    file = path / source.gguf_file if source.gguf_file is not None else path
    if file.suffix == ".gguf":
        if not os.path.isfile(file):
            hint = "of a Hub repository: model.name=OWNER/NAME model.gguf_file=FILE.gguf"
            raise ConfigError("there is no such file", where=key, found=file, hint=hint)
        return convert_gguf(file, cache_dir, key=key)
    if not os.path.isdir(path):
        allowed = "a Hub id, a folder, or a .gguf file"
        raise ConfigError("there is no such folder", where=key, found=path, allowed=allowed)
    if source.is_model:
        _check_model(config, _list_names(path), path, str(path), is_complete=True)
    return path


def _require(snapshot: Snapshot, file: str, name: str, *, key: str) -> None:
    """Raise a ConfigError about `key` if the repository `name` lacks the file; it lists others of the same kind."""
    if file in snapshot.names:
        return
    others = sorted(other for other in snapshot.names if other.endswith(Path(file).suffix))
    what, hint = f"{file} is not in the local cache", FETCH_FIRST
    if snapshot.is_complete:
        what, hint = f"the repository has no {file}", "another revision or repository"
    raise ConfigError(what, where=key, found=name, allowed=", ".join(others[:20]) or None, hint=hint)


def _check_model(config: ModelConfig, names: set[str], folder: Path, found: str, *, is_complete: bool) -> list[str]:
    """Check the small files of a model, and give the names of the files of weights.

    Args:
        config: the run's config of the model.
        names: names of all files that there are.
        folder: folder in which the small files are.
        found: the repository or folder, for messages.
        is_complete: False: `names` are those of a cache, in which files may be missing that the repository has.
    """
    if "config.json" in names and not config.trust_remote_code:
        _refuse_code(folder / "config.json", found)
    if config.init is Init.random:
        return []
    if _SINGLE in names:
        return [_SINGLE]
    if _INDEX not in names:
        raise _without_weights(names, found, is_complete)
    shards = _shards(folder / _INDEX, found)
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(shards)} files of weights are missing",
            where="model.name",
            found=f"{found} without {', '.join(missing[:3])}",
            hint="copy or download the whole folder" if is_complete else _WHILE_CONNECTED,
        )
    return shards


def _shards(index: Path, found: str) -> list[str]:
    """Read the names of the files of weights from their index; `found`: the repository or folder, for messages."""
    # An index may hold anything: what is not a map of names is told below.
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if all(isinstance(shard, str) and "/" not in shard and "\\" not in shard for shard in shards):
            return shards
    raise ConfigError(f"{_INDEX} is damaged", where="model.name", found=found, hint="copy or download it again")


def _without_weights(names: Set[str], found: str, is_complete: bool) -> ConfigError:
    """Make the error about files among which there are no weights to read, with what they are instead."""
    # Only safetensors are read, since a pickle can run code.
    pickles = sorted(name for name in names if name.endswith(_PICKLES) and name != "training_args.bin")
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    what, hint = "it holds no weights", "model.init=random takes its architecture alone"
    if is_complete and not names & {"config.json", "adapter_config.json"} and not gguf:
        what, hint = "it holds no model: there is no config.json", "a folder that save_pretrained has written"
    elif "adapter_config.json" in names:
        what, hint = "it holds an adapter, not a model", "model.name=ID of the adapter's base model"
    elif gguf:
        what, hint = "its weights are GGUF", f"model.gguf_file={gguf[0]}"
    elif pickles:
        what = f"its weights are pickles ({pickles[0]}), which can run code when they are opened"
        hint = (
            "another revision or repository with safetensors; or convert it once, in a place where code may run: "
            "AutoModelForCausalLM.from_pretrained(ID).save_pretrained(FOLDER), then model.name=FOLDER"
        )
    elif not is_complete:
        what, hint = "its weights are not in the local cache", _WHILE_CONNECTED
    allowed = f"{_SINGLE}, or {_INDEX} with its files"
    return ConfigError(what, where="model.name", found=found, allowed=allowed, hint=hint)


def _refuse_code(config_file: Path, found: str) -> None:
    """Refuse a config that names Python files of its repository, unless transformers has the type itself."""
    try:
        values = json.loads(config_file.read_bytes())
        kind = values.get("model_type")
        needs_code = "auto_map" in values and kind not in CONFIG_MAPPING
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        # A damaged config is told where transformers reads it.
        return
    if needs_code:
        raise ConfigError(
            "the model brings Python code of its own, which is not run",
            where="model.name",
            found=f"{found} ({kind})",
            allowed="a type that transformers knows",
            hint="model.trust_remote_code=true on the command line, once you have read that code",
        )
