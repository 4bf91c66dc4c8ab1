"""All keys of the config, from the dataclasses: to check names, to find the nearest, to say what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from hfdist.config.limits import LIMIT
from hfdist.config.run import RunConfig

# What people who know other tools type, and the key of the same purpose.
SYNONYMS = {
    "learning_rate": "optimizer.lr",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "train_batch_size": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "num_train_steps": "train.max_steps",
    "num_train_epochs": "train.max_steps",
    "epochs": "train.max_steps",
    "steps": "train.max_steps",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "mixed_precision": "train.precision",
    "clip_grad_norm": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "activation_checkpointing": "train.gradient_checkpointing",
    "torch_compile": "train.compile",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "block_size": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "dataset": "data.sources",
    "dataset_name": "data.sources",
    "model_name_or_path": "model.name",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "zero_stage": "strategy.sharding",
    "stage": "strategy.sharding",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "eval_steps": "train.eval_every",
    "logging_steps": "report.log_every",
    "report_to": "report.to",
    "warmup_ratio": "optimizer.warmup_steps",
    "lr_scheduler_type": "optimizer.schedule",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
}


@dataclass(frozen=True)
class Key:
    """One place of the config."""

    name: str
    """Dotted."""
    kind: Any
    """Its type."""
    allowed: str
    """In words."""


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every key of `RunConfig` by its dotted name, sections included."""
    return {key.name: key for key in _walk(RunConfig, "")}


def find_key(path: str) -> Key | None:
    """Give the key at `path`, also below free mappings such as `model.config`; None: there is none."""
    keys = all_keys()
    if path in keys:
        return keys[path]
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        parent = keys.get(".".join(parts[:end]))
        if parent is None:
            continue
        value = _mapping_value(parent.kind)
        if value is None:
            return None
        if not dataclasses.is_dataclass(value) or len(parts) == end + 1:
            return Key(path, value, "any value")
        inside = ".".join(parts[end + 1 :])
        return next((Key(path, key.kind, key.allowed) for key in _walk(value, "") if key.name == inside), None)
    return None


def nearest_key(path: str, extra: Sequence[str] = ()) -> str | None:
    """Give the key that was probably meant: by synonym, among its neighbours, or anywhere by its last part."""
    leaf = path.rsplit(".", 1)[-1]
    if leaf in SYNONYMS:
        return SYNONYMS[leaf]
    keys = [*all_keys(), *extra]
    by_leaf = [key for key in keys if key.rsplit(".", 1)[-1] == leaf]
    if by_leaf:
        return difflib.get_close_matches(path, by_leaf, n=1, cutoff=0.0)[0]
    neighbours = siblings(path)
    close = difflib.get_close_matches(path, neighbours, n=1, cutoff=0.6) if neighbours else []
    close = close or difflib.get_close_matches(path, keys, n=1, cutoff=0.6)
    if not close:
        leaves = {key.rsplit(".", 1)[-1]: key for key in keys}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    return close[0] if close else None


def siblings(path: str) -> list[str]:
    """Keys in the same section as `path`."""
    section, _, _ = path.rpartition(".")
    depth = path.count(".")
    if not section:
        return [key for key in all_keys() if "." not in key]
    return [key for key in all_keys() if key.startswith(f"{section}.") and key.count(".") == depth]


def allowed_at(path: str) -> str | None:
    """Say what a key takes; for a key that does not exist, which keys its section has."""
    key = find_key(path)
    if key is not None:
        return key.allowed
    return ", ".join(name.rsplit(".", 1)[-1] for name in siblings(path)) or None


def _walk(section: Any, prefix: str) -> Iterator[Key]:
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, kind = f"{prefix}{field.name}", kinds[field.name]
        limit = field.metadata.get(LIMIT)
        yield Key(name, kind, _in_words(kind, limit.allowed if limit else None))
        if dataclasses.is_dataclass(kind):
            yield from _walk(kind, f"{name}.")


def _in_words(kind: Any, limit: str | None) -> str:
    optional = type(None) in typing.get_args(kind)
    if optional:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    text = limit or _name(kind)
    if limit and kind is int:
        text = limit.replace("a number", "a whole number")
    return f"{text}, or null" if optional else text


def _name(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(member.name for member in kind)
    if dataclasses.is_dataclass(kind):
        return f"a section with {', '.join(field.name for field in dataclasses.fields(kind))}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind in names:
        return names[kind]
    return "a mapping" if typing.get_origin(kind) is dict else "a list"


def _mapping_value(kind: Any) -> Any:
    """Type of the values of a free mapping; None: not a mapping."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is not dict:
        return None
    return typing.get_args(kind)[1]
