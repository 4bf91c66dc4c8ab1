"""The Hugging Face config of the model that a run trains: found, overridden and checked before any weight exists."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from hfdist.apart import do_apart
from hfdist.config.composition.aliases import override_for
from hfdist.config.model import Attention, ModelConfig
from hfdist.config.paths import expand_user
from hfdist.config.task import Head
from hfdist.errors import ConfigError, HfdistError, first_line, nearest
from hfdist.models.build import make_without_values
from hfdist.models.cache_use import set_use_cache
from hfdist.models.heads import HEADS, IMAGE_TEXT, has_class, is_type
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.position_limit import most_positions

_LARGE_CONFIG = 1 << 20
"""Bytes of a config.json that is no longer read in this process: usual ones have some thousands."""
_MOST_HEADS = 256
"""The most attention heads that a hint proposes; each number is tried."""


def find_architecture(config: ModelConfig, *, sequence_length: int, head: Head = Head.tokens) -> PreTrainedConfig:
    """Give the model's Hugging Face config with `model.config.*` applied. Needs no tokenizer.

    Args:
        config: names the model, or its type and fields.
        sequence_length: tokens that the model must have positions for.
        head: what the model gives at its end.

    Raises:
        ConfigError: an unknown type or field, a type without such a head, or sequences longer than the model's
            positions.
    """
    if config.name is not None and not config.trust_remote_code:
        _try_in_child(config, head)
    architecture = _read_config(config) if config.name is not None else _make_config(config, head)
    classes = HEADS[head]
    if not has_class(head, architecture) and not config.trust_remote_code:
        raise ConfigError(
            f"transformers has no {classes.kind} of this type",
            where="model.name" if config.name else "model.type",
            found=architecture.model_type,
            allowed=f"a type with an {classes.auto.__name__} class",
            hint=_other_task(architecture.model_type) if config.name and head is Head.tokens else None,
        )
    if head is Head.score:
        architecture.num_labels = 1
    _check_positions(architecture, sequence_length)
    # `varlen` is set by `choose_attention`, which knows the run.
    if config.attention not in (Attention.auto, Attention.varlen):
        architecture._attn_implementation = config.attention.value
    # With a cache, transformers does not look for packed documents.
    set_use_cache(architecture, False)
    return architecture


def _other_task(kind: str) -> str:
    """Give a hint for a type that writes no text by itself: the tasks that such a type is for, or another model."""
    other = "another model.name, of a model that writes text"
    tasks = {Head.targets: "seq2seq", Head.masked: "mlm"}
    known = [f"hfdist tune task={task}" for head, task in tasks.items() if kind in HEADS[head].by_type]
    return ", or ".join([*known, other])


def check_fields(config: ModelConfig, head: Head = Head.tokens) -> None:
    """Check `model.type` and `model.config`, without files: with a `model.name`, `find_architecture` checks its fields.

    Raises:
        ConfigError: an unknown type or field, or a value that the field cannot have.
    """
    if config.name is None:
        _make_config(config, head)


def count_heads(architecture: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Give each number of heads in a config, with the name of its field.

    All kinds of attention are meant. A field may list the numbers of all layers, and is then given once for each.
    """
    for field, value in vars(architecture.get_text_config(decoder=True)).items():
        if re.fullmatch(r"\w*_heads|n_head", field):
            counts = value if isinstance(value, list) else [value]
            yield from ((field, count) for count in counts if isinstance(count, int))


def _try_in_child(config: ModelConfig, head: Head) -> None:
    """Make the model of `config.name`, without memory for weights, in a process of its own.

    Numbers in the config of somebody else may ask for more layers than any machine can make.
    """
    file = expand_user(str(config.name)) / "config.json"
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
        # The class is imported here, so that the fork has it: the import is most of the time. The child tells what is
        # wrong with the file.
        if file.stat().st_size < _LARGE_CONFIG:
            kind = json.loads(file.read_bytes()).get("model_type")
            getattr(transformers, str(HEADS[head].by_type.get(kind) or IMAGE_TEXT.by_type.get(kind)))

    def make() -> None:
        architecture = _read_config(config)
        if has_class(head, architecture):
            with torch.device("meta"):
                make_without_values(config, architecture, head=head)

    do_apart(make, where="model.name", found=file)


def _read_config(config: ModelConfig) -> PreTrainedConfig:
    """Read the config of a Hub repository or a folder, and change its fields as `model.config` asks."""
    assert config.name is not None
    _check_folder(config.name)
    with reading_from_hub("model.name", config.name):
        architecture = AutoConfig.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    _check_fields(architecture, config.config)
    with _naming_fields(config.config):
        for name, value in config.config.items():
            setattr(architecture, name, value)
        architecture.validate()
    return architecture


def _make_config(config: ModelConfig, head: Head) -> PreTrainedConfig:
    """Make a new config of the type `model.type`, with the fields of `model.config`."""
    kind, classes = config.type or "", HEADS[head]
    if not is_type(head, kind):
        raise ConfigError(
            f"transformers knows no {classes.kind} of this type",
            where="model.type",
            found=kind,
            allowed=f"one of {len(classes.by_type)} types, such as {classes.examples}",
            hint=nearest(kind, classes.by_type, "model.type={}"),
        )
    _check_fields(AutoConfig.for_model(kind), config.config)
    # The config is made with the fields and not changed afterwards: some follow from others, as a head's size from the
    # width.
    with _naming_fields(config.config, kind):
        return AutoConfig.for_model(kind, **config.config)


def _check_folder(name: str) -> None:
    """Check that a name that looks like a path is a model's folder: otherwise the Hub is asked for a strange id."""
    folder = expand_user(name)
    # Methods of Path would raise an OSError for a name that is too long.
    looks_local = name.startswith((".", "/", "~")) or os.path.exists(folder)
    if looks_local and not os.path.isfile(folder / "config.json"):
        raise ConfigError(
            "this folder holds no config.json",
            where="model.name",
            found=name,
            allowed="a Hub id, or a folder written by save_pretrained",
        )


def _check_fields(architecture: PreTrainedConfig, fields: Mapping[str, object]) -> None:
    """Check that the config's class has these fields, and that each value is of the kind that the field holds."""
    known = _field_names(architecture)
    for name, value in fields.items():
        key = f"model.config.{name}"
        if name not in known and not _reads(architecture, name):
            raise ConfigError(
                f"{type(architecture).__name__} has no such field",
                where=key,
                found=value,
                allowed=", ".join(sorted(known)),
                hint=_propose_field(name, value, known),
            )
        present = getattr(architecture, name, None)
        if not _same_kind(present, value):
            raise ConfigError(
                "a value of another type than the field holds",
                where=key,
                found=f"{value!r} ({type(value).__name__})",
                allowed=f"{type(present).__name__}, such as {present!r}",
            )


def _propose_field(name: str, value: object, known: Collection[str]) -> str:
    """Give a hint for an unknown field: the field that may be meant, or how a model of another type is described."""
    override = override_for(f"model.config.{name}", value) or ""
    field = override.removeprefix("model.config.").partition("=")[0]
    if override.startswith("model.config.") and field in known and field != name:
        return override
    other_type = (
        "a file model/NAME.yaml with `init: random`, the type and its own fields, for model=NAME --config-dir ..."
    )
    return nearest(name, known, f"model.config.{{}}={value}", cutoff=0.8) or other_type


@contextmanager
def _naming_fields(fields: dict[str, object], kind: str | None = None) -> Iterator[None]:
    """Turn an error of transformers' own checks, in this context, into a ConfigError that names the fields set."""
    try:
        yield
    except (HfdistError, MemoryError):
        raise
    except Exception as error:  # a config may hold anything
        if not fields:
            raise ConfigError(f"the model's config.json is damaged: {first_line(error)}", where="model.name") from error
        # The message of transformers begins with the names of its check and of Python's exceptions: they are cut off.
        reason = re.split(r"\b\w+Error: ", " ".join(str(error).split()))[-1] or type(error).__name__
        raise ConfigError(
            f"transformers refuses the fields: {reason}",
            where="model.config",
            found=", ".join(f"{name}={value}" for name, value in fields.items()),
            hint=_nearest_heads(kind, fields) if kind is not None and "heads" in reason else None,
        ) from error


def _field_names(architecture: PreTrainedConfig) -> set[str]:
    """Give the names of all fields that a user may set in a config, under both names where there are two."""
    names = set(architecture.to_dict()) | set(getattr(type(architecture), "attribute_map", {}))
    return {name for name in names if not name.startswith("_")} - {"model_type", "transformers_version", "dtype"}


def _reads(architecture: PreTrainedConfig, name: str) -> bool:
    """Whether the type's own code reads a field that its config does not declare, as Qwen3 MoE's reads `head_dim`."""
    file = Path(inspect.getfile(type(architecture)))
    code = file.with_name(file.name.replace("configuration_", "modeling_"))
    return code.is_file() and f'getattr(config, "{name}"' in code.read_text(encoding="utf-8")


def _same_kind(present: object, value: object) -> bool:
    """Whether `value` may take the place of `present`: None fits all, an int fits a float, a bool only a bool."""
    if present is None or value is None:
        return True
    if isinstance(present, bool) or isinstance(value, bool):
        return isinstance(present, bool) and isinstance(value, bool)
    if isinstance(present, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(present)) or isinstance(present, type(value))


def _check_positions(architecture: PreTrainedConfig, sequence_length: int) -> None:
    """Refuse sequences that are longer than the model has positions."""
    limit = most_positions(architecture)
    if limit is not None and limit < sequence_length:
        raise ConfigError(
            "sequences are longer than the model has positions",
            where="data.sequence_length",
            found=sequence_length,
            allowed=f"<= {limit} (model.config.max_position_embeddings)",
            hint=f"data.sequence_length={limit}; or, for random weights, "
            f"model.config.max_position_embeddings={sequence_length}",
        )


def _nearest_heads(kind: str, fields: dict[str, Any]) -> str | None:
    """Propose the number of attention heads nearest to the given one with which the config's class takes the fields."""
    heads = fields.get("num_attention_heads")
    if not isinstance(heads, int) or isinstance(heads, bool):
        return None
    for candidate in sorted(range(1, _MOST_HEADS + 1), key=lambda number: abs(number - heads)):
        if candidate % (fields.get("num_key_value_heads") or 1) == 0:
            with contextlib.suppress(TypeError, ValueError, StrictDataclassError):
                AutoConfig.for_model(kind, **{**fields, "num_attention_heads": candidate})
                return f"model.config.num_attention_heads={candidate}"
    return None
