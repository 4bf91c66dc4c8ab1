"""Makes the processor of a model of image and text from its files, with transformers' own class for the type."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]  # no __all__

from hfdist.apart import do_apart
from hfdist.config.model import ModelConfig
from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError, HfdistError, first_line

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Names of a processor's files, besides its tokenizer and its chat template."""
_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "audio_processor")
"""Arguments of a processor's class that are no settings."""
_NO_FILES = "the model's folder holds no processor, which says what an image becomes"


def list_processor_files(config: ModelConfig) -> list[Path]:
    """List the files of a model's processor; `config` names a folder of this machine, or no model."""
    if config.name is None:
        return []
    folder = expand_user(config.name)
    return [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy a processor's files into a folder, unchanged: a processor made here may lack parts for video or sound."""
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())


def load_processor(
    config: ModelConfig, architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ProcessorMixin:
    """Make the processor of a model with the run's tokenizer, which gets the tokens and the template that it lacks.

    Args:
        config: names a folder of this machine, with the processor's files.
        architecture: the model's config: its type says which class the processor has. No code of the folder runs.
        tokenizer: the run's tokenizer.

    Raises:
        ConfigError: there are no such files, or transformers makes no processor of them here.
    """
    name = PROCESSOR_MAPPING_NAMES.get(architecture.model_type)
    if name is None:
        what = "transformers names no processor for this type of model, which would say what an image becomes"
        hint = "data.images.used=false, which trains on text alone"
        raise ConfigError(what, where="model.name", found=architecture.model_type, hint=hint)
    files = list_processor_files(config)
    if not files:
        found = config.name or architecture.model_type
        hint = "a model.name with preprocessor_config.json; or data.images.used=false, which trains on text alone"
        raise ConfigError(_NO_FILES, where="model.name", found=found, allowed=", ".join(PROCESSOR_FILES), hint=hint)
    folder = files[0].parent
    do_apart(lambda: _load(folder, name, tokenizer), where="model.name", found=folder)
    return _load(folder, name, tokenizer)


def _load(folder: Path, name: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Make a processor of transformers' class `name`; the tokenizer gets its chat template."""
    try:
        made: type[ProcessorMixin] = without_video(getattr(transformers, name))
        values, _ = made.get_processor_dict(folder)
        # The folder names the class of this part: it must not be one of the repository's own code.
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        parts = {"image_processor": images, "tokenizer": tokenizer}
        settings = {key: value for key, value in values.items() if key not in _PARTS}
        processor: ProcessorMixin = made.from_args_and_dict(
            [parts.get(part) for part in made.get_attributes()], settings
        )
    except (HfdistError, MemoryError):
        raise
    except Exception as error:  # whatever a class raises on the files of somebody else
        what = f"the model's processor cannot be made: {first_line(error)}"
        hint = "data.images.used=false trains on text alone"
        raise ConfigError(what, where="model.name", found=f"{folder}, {name}", hint=hint) from error
    if processor.chat_template is not None:
        tokenizer.chat_template = processor.chat_template
    return processor


def without_video(made: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Give a subclass of a processor's class whose parts for video and sound may be missing.

    Such parts need packages that images do not need.
    """

    def check(self: Any, name: str, part: object) -> object:
        return None if part is None else made.check_argument_for_proper_class(self, name, part)

    return type(made.__name__, (made,), {"check_argument_for_proper_class": check})
