"""Where a model comes from: a Hub repository, a folder or a GGUF file becomes a verified folder on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock
from huggingface_hub import HfApi, constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfdist.apart import Limits, do_apart
from hfdist.atomic_write import write_atomically
from hfdist.config.model import Init, ModelConfig, TokenizerConfig
from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError, ResourceError
from hfdist.models.hub_client import FETCH_FIRST, DamagedError, ask, reading_from_hub

logger = logging.getLogger(__name__)

# Config, generation config, tokenizer, chat templates, and the index of the weights.
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates/"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WHILE_CONNECTED = "fetch it with `hf download` while connected"
_GGUF_FORMAT, _GGUF_SAMPLE_BYTES = 2, 1 << 20


@dataclass(frozen=True)
class ResolvedModel:
    """A model's config and tokenizer on this machine, and its weights once they are asked for."""

    model: ModelConfig
    """The run's config of the model, with local folders as names."""
    fetch_weights: Callable[[], object] = field(default=lambda: None, repr=False)
    """Downloads the weights, unless they are here. Call it before there is a process group, in which others would wait.
    Raises what `hub_client.ask` raises."""


def resolve_model(config: ModelConfig, *, cache_dir: Path) -> ResolvedModel:
    """Find the model and the tokenizer, and bring their small files here.

    A branch or tag is resolved once, so that config, tokenizer and weights are of one commit.

    Args:
        config: names a Hub repository, a folder or a GGUF file, for the model and for the tokenizer; or neither.
        cache_dir: for converted GGUF files, and for notes of what was verified. Downloads go to the Hub's own cache.

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
    if name.endswith(".gguf") or path.exists() or name.startswith((".", "/", "~")):
        return _Found(_find_here(config, path, gguf_file, cache_dir=cache_dir, key=key, is_model=is_model))
    repository = _Repository(name, key, cache_dir)
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
    small = [f for f in snapshot.names if f.endswith(suffixes) and ("/" not in f or f.startswith(_TEMPLATES))]
    folder = repository.fetch(snapshot, small)
    if not is_model:
        return _Found(folder)
    weights = _check_model(config, snapshot.names, folder, name, snapshot.is_complete)
    return _Found(folder, lambda: repository.fetch(snapshot, weights))


def _find_here(
    config: ModelConfig, path: Path, gguf_file: str | None, *, cache_dir: Path, key: str, is_model: bool
) -> Path:
    file = path / gguf_file if gguf_file is not None else path
    if file.suffix == ".gguf":
        if not file.is_file():
            hint = "of a Hub repository: model.name=OWNER/NAME model.gguf_file=FILE.gguf"
            raise ConfigError("there is no such file", where=key, found=file, hint=hint)
        return convert_gguf(file, cache_dir, key=key)
    if not path.is_dir():
        allowed = "a Hub id, a folder, or a .gguf file"
        raise ConfigError("there is no such folder", where=key, found=path, allowed=allowed)
    if is_model:
        _check_model(config, {file.name for file in path.iterdir() if file.is_file()}, path, str(path), True)
    return path


def _require(snapshot: _Snapshot, file: str, name: str, *, key: str) -> None:
    if file in snapshot.names:
        return
    others = sorted(other for other in snapshot.names if other.endswith(Path(file).suffix))
    what, hint = f"{file} is not in the local cache", FETCH_FIRST
    if snapshot.is_complete:
        what, hint = f"the repository has no {file}", "another revision or repository"
    raise ConfigError(what, where=key, found=name, allowed=", ".join(others[:20]) or None, hint=hint)


# ---- what the small files say ----


def _check_model(config: ModelConfig, names: set[str], folder: Path, found: str, is_complete: bool) -> list[str]:
    """Check the small files of a model, and give the names of the files of weights.

    Args:
        config: of the run.
        names: all files that there are.
        folder: with the small ones.
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
    """A config may name Python files of its repository; where transformers has the type itself, they are not needed."""
    try:
        values = json.loads(config_file.read_bytes())
        own_code, kind = "auto_map" in values, values.get("model_type")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
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


# ---- a repository in the Hub's own cache ----


@dataclass(frozen=True)
class _Snapshot:
    """One commit."""

    commit: str
    names: set[str]
    is_complete: bool
    """Whether these are all files of the repository; else those in the local cache."""


@dataclass(frozen=True)
class _Repository:
    """Files of `name`, which config key `key` gives."""

    name: str
    key: str
    cache_dir: Path

    def resolve(self, revision: str | None) -> _Snapshot:
        """Ask the Hub for the commit and its files; where it does not answer, look into the cache."""

        def action() -> _Snapshot:
            if not is_offline_mode():
                info = HfApi().model_info(self.name, revision=revision)
                assert info.sha is not None
                return _Snapshot(info.sha, {file.rfilename for file in info.siblings or ()}, is_complete=True)
            cached = self._cached(revision)
            if cached is None:
                raise LocalEntryNotFoundError("nothing of the repository is cached")
            return cached

        try:
            snapshot = ask(action, key=self.key, name=self.name)
        except ResourceError as error:
            cached = self._cached(revision)
            if cached is None:
                raise
            logger.warning("%s: %s; going on with the copy in the local cache", self.name, error.what)
            return cached
        if not is_offline_mode():
            self._remember(revision, snapshot.commit)
            logger.info("%s: commit %s", self.name, snapshot.commit)
        return snapshot

    def fetch(self, snapshot: _Snapshot, names: list[str]) -> Path:
        """Give the folder of the snapshot with these files in it, verified. One process of a machine at a time."""
        folder = self._storage / "snapshots" / snapshot.commit
        notes = self.cache_dir / "downloads"
        files = [folder / name for name in names]

        def action() -> None:
            notes.mkdir(parents=True, exist_ok=True)
            # huggingface_hub locks single files: who waits for the first would fetch the second meanwhile, and would
            # hash all of them once more.
            with FileLock(notes / f"{self._storage.name}.lock"):
                if not all(file.is_file() for file in files):
                    snapshot_download(self.name, revision=snapshot.commit, allow_patterns=names)
                _verify_files(files, notes)

        ask(action, key=self.key, name=self.name)
        return folder

    @property
    def _storage(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / f"models--{self.name.replace('/', '--')}"

    def _cached(self, revision: str | None) -> _Snapshot | None:
        ref = self._ref(revision)
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
        folder = self._storage / "snapshots" / commit
        if not commit or not folder.is_dir():
            return None
        try:
            files = get_cached_repo_tree(self.name, revision=commit)
        except CachedRepoTreeNotFoundError:
            names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
            return _Snapshot(commit, names, is_complete=False)
        return _Snapshot(commit, {file.path for file in files}, is_complete=True)

    def _ref(self, revision: str | None) -> Path:
        return self._storage / "refs" / (revision or constants.DEFAULT_REVISION)

    def _remember(self, revision: str | None, commit: str) -> None:
        """Note what a branch or tag is, as huggingface_hub does when it is asked for one: offline it is looked up."""
        ref = self._ref(revision)
        if revision == commit or (ref.is_file() and ref.read_text(encoding="utf-8") == commit):
            return
        # A cache that many share may be read-only.
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, commit.encode())


def _verify_files(files: Iterable[Path], notes: Path) -> None:
    """Hash the files that no earlier run has, and remove those that are damaged, so that they are fetched again.

    huggingface_hub compares sizes alone.

    Args:
        files: of a snapshot in the Hub's cache: links to files that bear their hash as a name.
        notes: a folder for what is verified.

    Raises:
        DamagedError: some are damaged, and are removed now.
    """

    def stamp(file: Path) -> tuple[Path, str]:
        status = file.stat()
        return notes / file.resolve().name, f"{status.st_size} {status.st_mtime_ns}"

    def is_verified(file: Path) -> bool:
        note, text = stamp(file)
        return note.is_file() and note.read_text(encoding="utf-8") == text

    unknown = [file for file in files if not is_verified(file)]
    with ThreadPoolExecutor(4) as pool:
        damaged = [file for file, agrees in zip(unknown, pool.map(_agrees, unknown), strict=True) if not agrees]
    for file in unknown:
        if file in damaged:
            # Two names may lead to one content.
            file.resolve().unlink(missing_ok=True)
            file.unlink()
        else:
            note, text = stamp(file)
            note.write_text(text, encoding="utf-8")
    if damaged:
        raise DamagedError(f"{damaged[0].name} does not have the hash that the Hub says")


def _agrees(file: Path) -> bool:
    """Compare the content with the name: SHA-256 of large files, git's SHA-1 of small ones."""
    blob = file.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        # Where the file system has no links, or a mirror of the Hub has other names.
        return True
    with blob.open("rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest() == blob.name


# ---- folders that are made once a machine ----


def make_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Give the folder that `write` fills: by the first process of the machine, while the others wait; whole or not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # An empty one is what a cleaner of caches leaves.
        if not folder.is_dir() or not any(folder.iterdir()):
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                write(temporary)
                temporary.chmod(0o755)
                os.replace(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert_gguf(file: Path, cache_dir: Path, *, key: str) -> Path:
    """Give the folder with the file's weights in float32, its config and its tokenizer; made unless it is there.

    The weights are converted whole, in one process of a machine, while the others wait: about six bytes of memory a
    parameter for its time, and 4 bytes of disk a parameter for good. Afterwards each process maps the folder, and reads
    what it keeps.

    Args:
        file: a GGUF file of an architecture that transformers can read.
        cache_dir: shared by all processes of the machine.
        key: the config key that names it, for messages.

    Raises:
        ConfigError: the package `gguf` is missing, or the file is damaged or of a kind that transformers cannot read.
        ResourceError: the disk is full.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            "the package gguf is missing, which reads this file", where=key, found=file, hint="pip install gguf"
        )
    if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", file.name):
        hint = "merge them first: llama-gguf-split --merge FIRST_PART MERGED.gguf"
        raise ConfigError("this is a part of a split file", where=key, found=file, hint=hint)
    # Another version of transformers reads the file anew.
    status = file.stat()
    words = f"{_GGUF_FORMAT} {transformers.__version__} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.blake2b(words.encode(), digest_size=12)
    with file.open("rb") as content:
        digest.update(content.read(_GGUF_SAMPLE_BYTES))
        content.seek(max(0, status.st_size - _GGUF_SAMPLE_BYTES))
        digest.update(content.read(_GGUF_SAMPLE_BYTES))
    folder = cache_dir / "gguf" / f"{file.stem}-{digest.hexdigest()}"

    def write(temporary: Path) -> None:
        logger.info("converting %s to safetensors in float32, once", file)
        # transformers does not read all of it: how spaces before digits are split, for one.
        logger.info("its tokenizer is rebuilt; model.tokenizer.name=ID of the original takes the exact one")
        limits = _limits_of_gguf(status.st_size)
        do_apart(lambda: _write_gguf(file, temporary, key), where=key, found=file, limits=limits)

    try:
        return make_once(folder, write)
    except OSError as error:
        what, hint = f"the converted model cannot be written: {error.strerror or error}", "data.cache_dir=FOLDER"
        raise ResourceError(
            what, where="data.cache_dir", found=folder.parent, hint=f"{hint} on a larger disk"
        ) from error


def _limits_of_gguf(num_bytes: int) -> Limits:
    """Limits to convert a GGUF file, which has two bits a parameter or more.

    Each byte of the file takes up to 24 bytes of memory. More is allowed, and CPU time is as generous.
    """
    return Limits(
        cpu_seconds=120 + num_bytes // 10**6,
        memory_bytes=4 * 2**30 + 32 * num_bytes,
        wall_seconds=900 + num_bytes / 10**5,
    )


def _write_gguf(file: Path, folder: Path, key: str) -> None:
    with reading_from_hub(key, str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32", output_loading_info=True
        )
    model, found = loaded
    # The weights are no longer quantized, and are not saved as long as the model says so.
    model.config.__dict__.pop("quantization_config", None)
    del model.hf_quantizer
    tokenizer.save_pretrained(folder)
    # What the file lacks has random values here: whether that may be is asked where the folder is read.
    missing = found["missing_keys"]
    model.save_pretrained(
        folder, state_dict={name: value for name, value in model.state_dict().items() if name not in missing}
    )
