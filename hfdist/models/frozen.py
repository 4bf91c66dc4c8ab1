"""A second model that is not trained, such as a teacher: its folder is checked early, and read when a rank needs it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import TrainingArguments as Arguments

from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.partitioning import Partitioning
from hfdist.models.tokenizer import as_tokenizer

logger = logging.getLogger(__name__)

SAFELY: dict[str, bool] = {"use_safetensors": True, "trust_remote_code": False}
"""Arguments of `from_pretrained` with which transformers runs no code of somebody else."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a model's weights, in one file or several."""
_END_BYTES = 2**20
"""Bytes of either end of a file that go into a fingerprint: training changes each tensor, so both ends change."""


def find_frozen(path: str, *, where: str, allowed: str, hint: str) -> PreTrainedConfig:
    """Find a model in a folder, and give its config. No weight is read.

    Args:
        path: the folder.
        where: the key that names the folder, for messages.
        allowed: what the folder should hold, for messages.
        hint: an override that works, for messages.

    Raises:
        ConfigError: the folder holds no model in safetensors, or a config that cannot be read.
    """
    folder = expand_user(path)
    # Methods of Path would raise an OSError for a name that is too long.
    missing = ""
    if not os.path.isfile(folder / "config.json"):
        missing = "config.json"
    elif not any(os.path.isfile(folder / name) for name in (_SINGLE, _INDEX)):
        missing = _SINGLE
    if missing:
        what, found = "the folder holds no such model", f"{path}, without {missing}"
        raise ConfigError(what, where=where, found=found, allowed=allowed, hint=hint)
    with reading_from_hub(where, path):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def fingerprint(path: str) -> str:
    """Give a digest of the weights in a folder, by the name, the size and both ends of each file.

    It is in hexadecimal, and changes when the folder gets other weights.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(expand_user(path).glob("*.safetensors")):
        num_bytes = file.stat().st_size
        digest.update(f"{file.name}:{num_bytes};".encode())
        with file.open("rb") as content:
            for start in (0, max(0, num_bytes - _END_BYTES)):
                content.seek(start)
                digest.update(content.read(_END_BYTES))
    return digest.hexdigest()


def read_tokenizer(path: str, *, where: str) -> PreTrainedTokenizerBase:
    """Read the tokenizer in the folder of a model.

    Raises:
        ConfigError: the folder at `path`, which the key `where` names, holds none.
    """
    with reading_from_hub(where, path):
        return as_tokenizer(AutoTokenizer.from_pretrained(expand_user(path), trust_remote_code=False))


def read_frozen(
    auto_class: Any,
    path: str,
    *,
    where: str,
    layout: Partitioning,
    arguments: Arguments,
    shard: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Read a model that only runs forward, in the run's precision, and move it to the run's device.

    Args:
        auto_class: one of transformers' Auto classes.
        path: the folder.
        where: the key that names the folder, for messages.
        layout: layout in which the run trains its own model.
        arguments: arguments of the run.
        shard: reduces the model to this rank's part, in place; None: it stays whole.

    Raises:
        ConfigError: the folder cannot be read.
    """
    dtype = torch.float32
    if arguments.bf16:
        dtype = torch.bfloat16
    elif arguments.fp16:
        dtype = torch.float16
    # This may come in the middle of a step or an evaluation, and takes minutes for a large model.
    logger.info("%s: reading %s", where, path)
    with reading_from_hub(where, path), layout.without_partitioning(arguments):
        model: Any = auto_class.from_pretrained(expand_user(path), dtype=dtype, **SAFELY)
    model.requires_grad_(False).eval()
    if shard is not None:
        # It is sharded before it is moved: a device need not have room for all of it.
        shard(model)
    frozen: PreTrainedModel = model.to(arguments.device)
    return frozen
