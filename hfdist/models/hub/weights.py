"""Which files of a repository or folder hold the weights; only safetensors are read, since a pickle can run code."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from hfdist.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_weights(names: Collection[str], read: Callable[[str], bytes], *, found: str, whole: bool = True) -> list[str]:
    """Give the names of the files that hold the weights.

    Args:
        names: all files that there are.
        read: gives the content of one of the small ones.
        found: the repository or folder, for messages.
        whole: False: `names` are those of a cache, in which files may be missing that the repository has.

    Raises:
        ConfigError: there are none, some are missing, or they are pickles.
    """
    if SINGLE in names:
        return [SINGLE]
    if INDEX in names:
        shards = _shards(read(INDEX), found)
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(shards)} files of weights are missing",
                where="model.name",
                found=f"{found} without {', '.join(missing[:3])}",
                hint="copy or download the whole folder" if whole else "fetch it with `hf download` while connected",
            )
        return shards
    raise _without_weights(names, found, whole)


def _shards(index: bytes, found: str) -> list[str]:
    try:
        shards = sorted(set(json.loads(index)["weight_map"].values()))
        is_plain = all(isinstance(shard, str) and "/" not in shard and "\\" not in shard for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_plain = False
    if not is_plain:
        raise ConfigError(f"{INDEX} is damaged", where="model.name", found=found, hint="copy or download it again")
    return shards


def _without_weights(names: Collection[str], found: str, whole: bool) -> ConfigError:
    pickles = sorted(name for name in names if name.endswith(_PICKLES) and name != "training_args.bin")
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    hint: str | None = "model.init=random takes its architecture alone"
    if "adapter_config.json" in names:
        what, hint = "it holds an adapter, not a model", "model.name=ID of the adapter's base model"
    elif gguf:
        what, hint = "its weights are GGUF", f"model.gguf_file={gguf[0]}"
    elif pickles:
        what = f"its weights are pickles ({pickles[0]}), which can run code when they are opened"
        hint = (
            "another revision or repository with safetensors; or convert it once, in a place where code may run: "
            "AutoModelForCausalLM.from_pretrained(ID).save_pretrained(FOLDER), then model.name=FOLDER"
        )
    elif whole:
        what = "it holds no weights"
    else:
        what, hint = "its weights are not in the local cache", "fetch it with `hf download` while connected"
    return ConfigError(what, where="model.name", found=found, allowed=f"{SINGLE}, or {INDEX} with its files", hint=hint)
