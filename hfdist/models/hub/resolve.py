"""Where a model starts from: a Hub repository, a folder or a GGUF file becomes a folder on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfdist.config.model import Init, ModelConfig, TokenizerConfig
from hfdist.errors import ConfigError
from hfdist.models.hub.client import FETCH_FIRST, Patience
from hfdist.models.hub.gguf import convert_gguf
from hfdist.models.hub.repository import Repository, Snapshot
from hfdist.models.hub.weights import INDEX, SINGLE, find_weights

# Config, generation config, tokenizer, chat templates, and the index of the weights.
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates/"


def _nothing() -> None:
    """The weights are here, or not wanted."""


@dataclass(frozen=True)
class Start:
    """A model's config and tokenizer on this machine, and its weights once they are asked for."""

    model: ModelConfig
    """As in the run's config, with local folders as names."""
    _fetch_weights: Callable[[], None] = field(default=_nothing, repr=False)

    def fetch_weights(self) -> None:
        """Download the weights, unless they are here. Before there is a process group, in which others would wait.

        Raises:
            ConfigError, ResourceError: they cannot be had; see `hub.ask`.
        """
        self._fetch_weights()


def find_start(config: ModelConfig, *, cache_dir: Path, patience: Patience | None = None) -> Start:
    """Find the model and the tokenizer, and bring their small files here.

    A branch or tag is resolved once, so that config, tokenizer and weights are of one commit.

    Args:
        config: names a Hub repository, a folder or a GGUF file, for the model and for the tokenizer; or neither.
        cache_dir: for converted GGUF files, and for notes of what was verified. Downloads go to the Hub's own cache.
        patience: with a Hub that does not answer; None: the usual.

    Raises:
        ConfigError: no such model, no access, pickles instead of safetensors, code of its own, or missing files.
        ResourceError: the Hub does not answer, or the disk is full.
    """
    places = _Places(config, cache_dir, patience)
    if config.name is None:
        return Start(replace(config, tokenizer=find_tokenizer(config, cache_dir=cache_dir, patience=patience)))
    place = places.find(config.name, config.revision, config.gguf_file, key="model.name", is_model=True)
    folder = str(place.folder)
    if _is_the_models(config):
        tokenizer = replace(config.tokenizer, name=folder, revision=None)
    else:
        tokenizer = find_tokenizer(config, cache_dir=cache_dir, patience=patience)
    model = replace(config, name=folder, revision=None, gguf_file=None, tokenizer=tokenizer)
    return Start(model, place.fetch_weights)


def find_tokenizer(config: ModelConfig, *, cache_dir: Path, patience: Patience | None = None) -> TokenizerConfig:
    """Find the tokenizer alone; as in `find_start`. One that is trained on the corpus stays as it is."""
    tokenizer = config.tokenizer
    if tokenizer.name is None:
        return tokenizer
    gguf_file = config.gguf_file if _is_the_models(config) else None
    places = _Places(config, cache_dir, patience)
    place = places.find(tokenizer.name, tokenizer.revision, gguf_file, key="model.tokenizer.name", is_model=False)
    return replace(tokenizer, name=str(place.folder), revision=None)


def _is_the_models(config: ModelConfig) -> bool:
    """Whether the tokenizer comes with the model."""
    name, revision = config.tokenizer.name, config.tokenizer.revision
    if name is None or config.name is None or revision != config.revision:
        return False
    return Path(name).expanduser() == Path(config.name).expanduser()


@dataclass(frozen=True)
class _Place:
    folder: Path
    fetch_weights: Callable[[], None] = _nothing


@dataclass(frozen=True)
class _Places:
    """Finds folders for names."""

    config: ModelConfig
    cache_dir: Path
    patience: Patience | None

    def find(self, name: str, revision: str | None, gguf_file: str | None, *, key: str, is_model: bool) -> _Place:
        path = Path(name).expanduser()
        if name.endswith(".gguf") or path.exists() or name.startswith((".", "/", "~")):
            return _Place(self._local(path, gguf_file, key=key, is_model=is_model))
        return self._on_hub(name, revision, gguf_file, key=key, is_model=is_model)

    def _local(self, path: Path, gguf_file: str | None, *, key: str, is_model: bool) -> Path:
        file = path / gguf_file if gguf_file is not None else path
        if file.suffix == ".gguf":
            if not file.is_file():
                raise ConfigError(
                    "there is no such file",
                    where=key,
                    found=file,
                    hint="of a Hub repository: model.name=OWNER/NAME model.gguf_file=FILE.gguf",
                )
            return convert_gguf(file, self.cache_dir, key=key)
        if not path.is_dir():
            raise ConfigError(
                "there is no such folder", where=key, found=path, allowed="a Hub id, a folder, or a .gguf file"
            )
        if is_model:
            names = {file.name for file in path.iterdir() if file.is_file()}
            self._check(names, path, str(path), whole=True)
        return path

    def _on_hub(self, name: str, revision: str | None, gguf_file: str | None, *, key: str, is_model: bool) -> _Place:
        repository = Repository(name, key, self.cache_dir, self.patience)
        snapshot = repository.resolve(revision)
        if gguf_file is not None:
            self._require(snapshot, gguf_file, name, key="model.gguf_file")
            return _Place(convert_gguf(repository.fetch(snapshot, [gguf_file]) / gguf_file, self.cache_dir, key=key))
        small = [file for file in snapshot.names if self._is_small(file)]
        if is_model:
            if "config.json" not in snapshot.names and not {SINGLE, INDEX} & snapshot.names:
                # Says more than that there is no config: an adapter, say, or GGUF.
                find_weights(snapshot.names, lambda _: b"", found=name, whole=snapshot.whole)
            self._require(snapshot, "config.json", name, key=key)
        folder = repository.fetch(snapshot, small)
        if not is_model:
            return _Place(folder)
        weights = self._check(snapshot.names, folder, name, whole=snapshot.whole)

        def fetch_weights() -> None:
            repository.fetch(snapshot, weights)

        return _Place(folder, fetch_weights)

    def _is_small(self, file: str) -> bool:
        suffixes = (*_SMALL, ".py") if self.config.trust_remote_code else _SMALL
        return file.endswith(suffixes) and ("/" not in file or file.startswith(_TEMPLATES))

    def _check(self, names: set[str], folder: Path, found: str, *, whole: bool) -> list[str]:
        """Check what the small files say, and give the names of the files of weights."""
        if "config.json" in names and not self.config.trust_remote_code:
            _refuse_code(folder / "config.json", found)
        if self.config.init is Init.random:
            return []
        return find_weights(names, lambda name: (folder / name).read_bytes(), found=found, whole=whole)

    @staticmethod
    def _require(snapshot: Snapshot, file: str, name: str, *, key: str) -> None:
        if file not in snapshot.names:
            others = sorted(other for other in snapshot.names if other.endswith(Path(file).suffix))
            raise ConfigError(
                f"the repository has no {file}" if snapshot.whole else f"{file} is not in the local cache",
                where=key,
                found=name,
                allowed=", ".join(others[:20]) or None,
                hint="another revision or repository" if snapshot.whole else FETCH_FIRST,
            )


def _refuse_code(config_file: Path, found: str) -> None:
    """A config may name Python files of its repository; where transformers has the type itself, they are not needed."""
    try:
        values = json.loads(config_file.read_bytes())
        own_code, kind = "auto_map" in values, values.get("model_type")
    except (OSError, ValueError, TypeError, AttributeError):
        # Told where it is read as a config.
        return
    if own_code and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            "the model brings Python code of its own, which is not run",
            where="model.name",
            found=f"{found} ({kind})",
            allowed="a type that transformers knows",
            hint="model.trust_remote_code=true on the command line, once you have read that code",
        )
