"""The files of a folder of the Hub besides weights: config, generation config and tokenizer."""

from __future__ import annotations

import copy
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import first_line
from hfdist.models.cache_use import set_use_cache
from hfdist.models.embeddings import scores_sequences
from hfdist.trainer.checkpointing.adapter_files import has_adapter, write_adapter_config

logger = logging.getLogger(__name__)


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
            # transformers refuses to write some generation configs of the Hub; weights must not be lost over it.
            logger.warning("generation_config.json is left out: %s", first_line(error))
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


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
