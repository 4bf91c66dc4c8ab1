"""Config, generation config and tokenizer of a Hub folder, and the files of an adapter's PEFT folder."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from hfdist.checkpoint.piece import Piece
from hfdist.errors import CheckpointError, ConfigError, first_line, named_line
from hfdist.models.adapter import NAME
from hfdist.models.cache_use import set_use_cache
from hfdist.models.embeddings import scores_sequences
from hfdist.models.value_head import is_of_value_head

logger = logging.getLogger(__name__)

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
    """PEFT's name of each tensor of the adapter, by the model's own name; only of the tensors on this rank."""
    from peft import get_peft_model_state_dict

    # PEFT chooses and renames by names alone, so names can stand in for the values.
    names = {name: name for name in model.state_dict(keep_vars=True)}
    with_embeddings = _has_other_embeddings(model)
    kept = get_peft_model_state_dict(model, state_dict=names, adapter_name=NAME, save_embedding_layers=with_embeddings)
    return {own: name if name.startswith(_PREFIX) else _PREFIX + name for name, own in kept.items()}


def _has_other_embeddings(model: Any) -> bool:
    """Whether the model's embeddings are more or fewer than in the base that the adapter names, as PEFT asks it.

    Then they are kept with the adapter. Not by PEFT, which asks the Hub.
    """
    base, config = model.peft_config[NAME].base_model_name_or_path, getattr(model, "config", None)
    if not base or not isinstance(config, PreTrainedConfig):
        return False
    try:
        file = cached_file(base, "config.json", revision=model.peft_config[NAME].revision, local_files_only=True)
        there = type(config).from_pretrained(str(Path(str(file)).parent))
    except (OSError, ValueError):
        return False
    sizes = [getattr(one.get_text_config(), "vocab_size", None) for one in (config, there)]
    return sizes[0] != sizes[1]


def write_model_files(model: nn.Module, tokenizer: object, folder: Path) -> None:
    """Write what makes a Hub model of weights, or a PEFT folder of an adapter; `tokenizer` may be None."""
    if has_adapter(model):
        write_adapter_config(model, folder)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, folder)
    else:
        write_hub_files(model, tokenizer, folder)


def write_hub_files(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write config, generation config and tokenizer, where there is one."""
    if isinstance(getattr(model, "config", None), PreTrainedConfig):
        config = copy.deepcopy(model.config)
        # What `PreTrainedModel.save_pretrained` fills in; and a cache, which training has switched off.
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        set_use_cache(config, True)
        if scores_sequences(model) and tokenizer is not None and config.pad_token_id == tokenizer.eos_token_id:
            # transformers would read the score in front of the end, and it is trained at the end.
            config.pad_token_id = None
        config.save_pretrained(folder)
    if isinstance(model, PreTrainedModel) and model.can_generate():
        generation = copy.deepcopy(model.generation_config)
        if generation.use_cache is False:
            # Made from the config, so its cache is off as well.
            generation.use_cache = True
        try:
            generation.save_pretrained(folder)
        except ValueError as error:
            # Some Hub models carry one that transformers itself refuses to write; weights must not be lost over it.
            logger.warning("generation_config.json is left out: %s", first_line(error))
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


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


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The tokenizers library tells the system's errors in words alone.
        number = re.search(r"\(os error (\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def read_files(write: Callable[[Path], None], leave_out: re.Pattern[str] | None = None) -> dict[str, bytes]:
    """Give the contents of the files that `write` writes into a folder, by their paths in it.

    `leave_out`: a pattern of names that are not read; None: all are.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        files = [path for path in files if leave_out is None or not leave_out.fullmatch(path.name)]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
