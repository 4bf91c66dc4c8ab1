"""Where a model comes from: a Hub repository, a folder or a GGUF file becomes a verified folder on this machine."""

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


@dataclass(frozen=True)
class ResolvedModel:
    """A model's config and tokenizer on this machine, and its weights once they are asked for."""

    model: ModelConfig
    """The run's config of the model, with local folders as names."""
    fetch_weights: Callable[[], object] = field(default=lambda: None, repr=False)
    """Downloads the weights, unless they are here. Call it before there is a process group, in which others would wait.
    Raises what `hub_client.ask_hub` raises."""


def resolve_model(config: ModelConfig, *, cache_dir: Path) -> ResolvedModel:
    """Find the model and the tokenizer, and bring their small files here.

    A branch or tag is resolved once, so that config, tokenizer and weights are of one commit.

    Args:
        config: names a Hub repository, a folder or a GGUF file, for the model and for the tokenizer; or neither.
        cache_dir: folder of converted GGUF files and notes of what was verified. Downloads go to the Hub's own cache.

    Raises:
        ConfigError: no such model, no access, pickles instead of safetensors, code of its own, or missing files.
        ResourceError: the Hub does not answer, or the disk is full.
    """
    if config.name is None:
        return ResolvedModel(replace(config, tokenizer=resolve_tokenizer(config, cache_dir=cache_dir)))
    found = _find(
        config, config.name, config.revision, config.gguf_file, cache_dir=cache_dir, key="model.name", is_model=True
    )
    folder = str(found.folder)
    if _has_the_models_name(config):
        tokenizer = replace(config.tokenizer, name=folder, revision=None)
    else:
        tokenizer = resolve_tokenizer(config, cache_dir=cache_dir)
    model = replace(config, name=folder, revision=None, gguf_file=None, tokenizer=tokenizer)
    return ResolvedModel(model, found.fetch_weights)


def resolve_tokenizer(config: ModelConfig, *, cache_dir: Path) -> TokenizerConfig:
    """Find the tokenizer alone; as in `resolve_model`. One that is trained on the corpus stays as it is."""
    tokenizer = config.tokenizer
    if tokenizer.name is None:
        return tokenizer
    gguf_file = config.gguf_file if _has_the_models_name(config) else None
    found = _find(
        config, tokenizer.name, tokenizer.revision, gguf_file,
        cache_dir=cache_dir, key="model.tokenizer.name", is_model=False,
    )  # fmt: skip
    return replace(tokenizer, name=str(found.folder), revision=None)


def _has_the_models_name(config: ModelConfig) -> bool:
    """Whether the tokenizer comes with the model."""
    name, revision = config.tokenizer.name, config.tokenizer.revision
    if name is None or config.name is None or revision != config.revision:
        return False
    return expand_user(name) == expand_user(config.name)


def list_files(config: ModelConfig, folder: Path) -> list[str]:
    """List the files of a resolved model that somebody else needs: the small ones, and weights if they are read.

    Raises:
        ConfigError: some are missing.
    """
    names = _list_names(folder)
    weights = _check_model(config, names, folder, str(folder), is_complete=True)
    return sorted({*weights, *(name for name in names if name.endswith(_SMALL))})


def _list_names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.is_file()}


@dataclass(frozen=True)
class _Found:
    folder: Path
    fetch_weights: Callable[[], object] = lambda: None


def _find(
    config: ModelConfig,
    name: str,
    revision: str | None,
    gguf_file: str | None,
    *,
    cache_dir: Path,
    key: str,
    is_model: bool,
) -> _Found:
    path = expand_user(name)
    # Methods of Path would raise an OSError for a name that is too long.
    if name.endswith(".gguf") or os.path.exists(path) or name.startswith((".", "/", "~")):
        return _Found(_find_here(config, path, gguf_file, cache_dir=cache_dir, key=key, is_model=is_model))
    repository = Repository(name, key, cache_dir)
    snapshot = repository.resolve(revision)
    if gguf_file is not None:
        _require(snapshot, gguf_file, name, key="model.gguf_file")
        return _Found(convert_gguf(repository.fetch(snapshot, [gguf_file]) / gguf_file, cache_dir, key=key))
    if is_model:
        if "config.json" not in snapshot.names and not {_SINGLE, _INDEX} & snapshot.names:
            # Says more than that there is no config: an adapter, say, or GGUF.
            raise _without_weights(snapshot.names, name, snapshot.is_complete)
        _require(snapshot, "config.json", name, key=key)
    suffixes = (*_SMALL, ".py") if config.trust_remote_code else _SMALL
    inside = (_TEMPLATES, _POOLING)
    small = [f for f in snapshot.names if f.endswith(suffixes) and ("/" not in f or f.startswith(inside))]
    folder = repository.fetch(snapshot, small)
    if not is_model:
        return _Found(folder)
    weights = _check_model(config, snapshot.names, folder, name, is_complete=snapshot.is_complete)
    return _Found(folder, lambda: repository.fetch(snapshot, weights))


def _find_here(
    config: ModelConfig, path: Path, gguf_file: str | None, *, cache_dir: Path, key: str, is_model: bool
) -> Path:
    file = path / gguf_file if gguf_file is not None else path
    if file.suffix == ".gguf":
        if not os.path.isfile(file):
            hint = "of a Hub repository: model.name=OWNER/NAME model.gguf_file=FILE.gguf"
            raise ConfigError("there is no such file", where=key, found=file, hint=hint)
        return convert_gguf(file, cache_dir, key=key)
    if not os.path.isdir(path):
        allowed = "a Hub id, a folder, or a .gguf file"
        raise ConfigError("there is no such folder", where=key, found=path, allowed=allowed)
    if is_model:
        _check_model(config, _list_names(path), path, str(path), is_complete=True)
    return path


def _require(snapshot: Snapshot, file: str, name: str, *, key: str) -> None:
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
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if all(isinstance(shard, str) and "/" not in shard and "\\" not in shard for shard in shards):
            return shards
    raise ConfigError(f"{_INDEX} is damaged", where="model.name", found=found, hint="copy or download it again")


def _without_weights(names: Set[str], found: str, is_complete: bool) -> ConfigError:
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
        # Told where it is read as a config.
        return
    if needs_code:
        raise ConfigError(
            "the model brings Python code of its own, which is not run",
            where="model.name",
            found=f"{found} ({kind})",
            allowed="a type that transformers knows",
            hint="model.trust_remote_code=true on the command line, once you have read that code",
        )
