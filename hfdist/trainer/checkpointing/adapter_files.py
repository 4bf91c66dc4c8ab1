"""The files of an adapter: its tensors under PEFT's names, and its config."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from hfdist.checkpoint.piece import Piece
from hfdist.errors import CheckpointError, ConfigError, named_line
from hfdist.models.adapter import NAME
from hfdist.models.value_head import is_of_value_head

_PREFIX = "base_model.model."
"""PEFT's wrapper around a model: all names in its files carry it."""
_NO_PLACE = "a trained weight is no part of the adapter, so PEFT's files have no place for it"
_NAME_IT = "modules_to_save=[...] of the adapter names what is trained besides"


def has_adapter(model: nn.Module) -> bool:
    """Whether the model, or this rank's part of it, holds an adapter."""
    return NAME in getattr(model, "peft_config", {})


def check_adapter_names(model: nn.Module) -> None:
    """Name what a save of the model's adapter would hold, while the model is whole; without an adapter, do nothing.

    Raises:
        ConfigError: PEFT has no names for it, or something is trained that its files have no place for.
    """
    if not has_adapter(model):
        return
    try:
        names = _names_in_files(model)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        what = f"PEFT cannot name what it would save of this adapter: {named_line(error)}"
        raise ConfigError(what, where="adapter", hint="adapter=lora") from error
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in names and not is_of_value_head(name):
            raise ConfigError(_NO_PLACE, where=name, hint=_NAME_IT)


def adapter_pieces(model: nn.Module, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Give the pieces of the model's adapter, under PEFT's names; without an adapter, all as they are.

    A CheckpointError says that something is trained that PEFT would not keep.
    """
    if not has_adapter(model):
        yield from pieces
        return
    names = _names_in_files(model)
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for piece in pieces:
        if piece.name in names:
            yield dataclasses.replace(piece, name=names[piece.name])
        elif is_of_value_head(piece.name):
            # Beside the adapter, as beside a whole model.
            yield piece
        elif piece.name in trained:
            raise CheckpointError(_NO_PLACE, where=piece.name, hint=_NAME_IT)


def _names_in_files(model: nn.Module) -> dict[str, str]:
    """Give PEFT's name of each tensor of the adapter on this rank, by the model's own name."""
    # Imported late: PEFT takes a second to import, and most models have no adapter.
    from peft import get_peft_model_state_dict

    # PEFT chooses and renames by names alone, so names can stand in for the values.
    names = {name: name for name in model.state_dict(keep_vars=True)}
    with_embeddings = _has_other_embeddings(model)
    kept = get_peft_model_state_dict(model, state_dict=names, adapter_name=NAME, save_embedding_layers=with_embeddings)
    return {own: name if name.startswith(_PREFIX) else _PREFIX + name for name, own in kept.items()}


def _has_other_embeddings(model: Any) -> bool:
    """Whether the model has another number of embeddings than the base that the adapter names.

    Embeddings are then saved with the adapter, as PEFT does it. PEFT itself would look at the base on the Hub; this
    looks at the files of this machine alone.
    """
    base, config = model.peft_config[NAME].base_model_name_or_path, getattr(model, "config", None)
    if not base or not isinstance(config, PreTrainedConfig):
        return False
    try:
        file = cached_file(base, "config.json", revision=model.peft_config[NAME].revision, local_files_only=True)
        there = type(config).from_pretrained(str(Path(str(file)).parent))
    except (OSError, ValueError):
        return False
    size_here = getattr(config.get_text_config(), "vocab_size", None)
    return size_here != getattr(there.get_text_config(), "vocab_size", None)


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write `adapter_config.json`, the same in every layout."""
    config = copy.deepcopy(model.peft_config[NAME])
    config.inference_mode = True
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, set):
            # A set has another order in each process.
            setattr(config, field.name, sorted(value))
    config.save_pretrained(str(folder))
