"""A second model, which is not trained: its folder is checked early, and read once a rank needs it."""

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
"""Arguments with which transformers runs no code of somebody else's."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a model's weights, in one file or several."""
_END_BYTES = 2**20
"""Training changes each tensor, so the ends of a file tell its weights from others."""


def find_frozen(path: str, *, where: str, allowed: str, hint: str) -> PreTrainedConfig:
    """Give the config of a model in a folder; ConfigError: the folder holds none in safetensors.

    Args:
        path: the folder.
        where: the key that names it.
        allowed: what the folder should hold.
        hint: an override that works.
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
    """Give a digest that changes when the weights in a folder are others: of the size and both ends of each file."""
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
    """Read the tokenizer in the folder of a model; ConfigError: it holds none."""
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
    """Read a whole model for evaluations alone, in the run's precision, on its device.

    Args:
        auto_class: one of transformers'.
        path: the folder.
        where: the key that names it.
        layout: layout in which the run trains another model.
        arguments: arguments of the run.
        shard: leaves this rank's part of the model, in place; None: it stays whole.
    """
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    # A large one takes minutes, within a step or an evaluation.
    logger.info("%s: reading %s", where, path)
    with reading_from_hub(where, path), layout.without_partitioning(arguments):
        model: Any = auto_class.from_pretrained(expand_user(path), dtype=dtype, **SAFELY)
    model.requires_grad_(False).eval()
    if shard is not None:
        # It is sharded before it is moved: a device need not have room for all of it.
        shard(model)
    frozen: PreTrainedModel = model.to(arguments.device)
    return frozen
