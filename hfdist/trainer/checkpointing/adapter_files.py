"""An adapter in the folders that a run writes: PEFT's own files and names, without the model that it belongs to."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from hfdist.checkpoint.piece import Piece
from hfdist.errors import CheckpointError
from hfdist.models.adapter import NAME

_PREFIX = "base_model.model."
"""Of PEFT's wrapper around a model, which all names in its files carry."""


def has_adapter(model: Any) -> bool:
    """Whether the model, or this rank's part of it, holds an adapter."""
    return NAME in getattr(model, "peft_config", {})


def adapter_pieces(model: Any, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Give the pieces that belong to the model's adapter, under PEFT's names; without an adapter, all as they are.

    Raises:
        CheckpointError: something is trained that PEFT would not keep.
    """
    if not has_adapter(model):
        yield from pieces
        return
    names = _names_in_files(model)
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for piece in pieces:
        if piece.name in names:
            yield dataclasses.replace(piece, name=names[piece.name])
        elif piece.name in trained:
            raise CheckpointError(
                "a trained weight is no part of the adapter, so PEFT's files have no place for it",
                where=piece.name,
                hint="adapter.modules_to_save=[...] names what is trained besides",
            )


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write `adapter_config.json`, the same in every layout."""
    config = copy.deepcopy(model.peft_config[NAME])
    config.inference_mode = True
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, set):
            # The order of a set is that of this process.
            setattr(config, field.name, sorted(value))
    config.save_pretrained(str(folder))


def _names_in_files(model: nn.Module) -> dict[str, str]:
    """PEFT's name of each tensor of the adapter, by the model's own name; on a cut model, of what is left."""
    from peft import get_peft_model_state_dict

    saved = model.state_dict(keep_vars=True).keys()
    # PEFT chooses and renames by names alone, so names can stand in for the values.
    kept = get_peft_model_state_dict(
        model, state_dict={name: name for name in saved}, adapter_name=NAME, save_embedding_layers=False
    )
    return {own: name if name.startswith(_PREFIX) else _PREFIX + name for name, own in kept.items()}
