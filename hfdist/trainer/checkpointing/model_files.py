"""Config, generation config and tokenizer of the model that is trained, as files of a Hub folder."""

from __future__ import annotations

import copy
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.trainer.checkpointing.adapter_files import has_adapter, write_adapter_config

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of a save.

logger = logging.getLogger(__name__)


def write_model_files(trainer: Any, folder: Path) -> None:
    """Write all that makes a Hub model of weights, or a PEFT folder of an adapter's."""
    # As in the original, that of the collator where the Trainer was given none.
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if not has_adapter(trainer.model):
        write_hub_files(trainer.model, tokenizer, folder)
        return
    write_adapter_config(trainer.model, folder)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


def write_hub_files(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write config, generation config and tokenizer (None: no tokenizer); of a module without a config the rest."""
    if isinstance(getattr(model, "config", None), PreTrainedConfig):
        config = copy.deepcopy(model.config)
        # What `PreTrainedModel.save_pretrained` fills in; and a cache, which training has switched off.
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        config.use_cache = True
        config.save_pretrained(folder)
    if isinstance(model, PreTrainedModel) and model.can_generate():
        _save_generation_config(model.generation_config, folder)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


class RenderedModelFiles:
    """The same files in memory: they do not change while a model is trained, and a large tokenizer takes long."""

    def __init__(self) -> None:
        self._content: dict[str, bytes] = {}

    def render(self, trainer: Any) -> None:
        """Make them."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_model_files(trainer, folder)
            files = [path for path in folder.rglob("*") if path.is_file()]
            self._content = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def write(self, folder: Path) -> None:
        """Write them."""
        for name, content in self._content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def _save_generation_config(config: Any, folder: Path) -> None:
    try:
        config.save_pretrained(folder)
    except ValueError as error:
        # Some Hub models carry one that transformers itself refuses to write; weights must not be lost over it.
        logger.warning("generation_config.json is left out: %s", str(error).splitlines()[0])


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The tokenizers library tells the system's errors in words alone.
        number = re.search(r"\(os error (\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
