"""A GGUF file as a folder of safetensors: converted once a machine, then mapped into memory like any other model."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.errors import ConfigError, ResourceError
from hfdist.models.hub.client import reading_from_hub

logger = logging.getLogger(__name__)

_FORMAT = 2
_SAMPLE_BYTES = 1 << 20


def convert_gguf(file: Path, cache_dir: Path, *, key: str) -> Path:
    """Give the folder with the file's weights in float32, its config and its tokenizer; made unless it is there.

    The weights are converted whole, in one process of a machine, while the others wait: about six bytes of memory a
    parameter for its time, and 4 bytes of disk a parameter for good. Afterwards each process maps the folder, and reads
    what it keeps.

    Args:
        file: a GGUF file of an architecture that transformers can read.
        cache_dir: shared by all processes of the machine.
        key: the config key that names it, for messages.

    Raises:
        ConfigError: the package `gguf` is missing, or the file is damaged or of a kind that transformers cannot read.
        ResourceError: the disk is full.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            "the package gguf is missing, which reads this file",
            where=key,
            found=file,
            hint="pip install gguf",
        )
    folder = cache_dir / "gguf" / f"{file.stem}-{_identify(file)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            logger.info("converting %s to safetensors in float32, once", file)
            # transformers does not read all of it: how spaces before digits are split, for one.
            logger.info("its tokenizer is rebuilt; model.tokenizer.name=ID of the original takes the exact one")
            _convert(file, folder, key)
    return folder


def _identify(file: Path) -> str:
    """Hash of where transformers and the file stand: its size, time, first and last bytes."""
    status = file.stat()
    words = f"{_FORMAT} {transformers.__version__} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.blake2b(words.encode(), digest_size=12)
    with file.open("rb") as content:
        digest.update(content.read(_SAMPLE_BYTES))
        content.seek(max(0, status.st_size - _SAMPLE_BYTES))
        digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _convert(file: Path, folder: Path, key: str) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with reading_from_hub(key, str(file)):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype="float32", output_loading_info=True
            )
            model, found = loaded
        if found["missing_keys"]:
            raise ConfigError(
                "the file does not hold all weights of the model",
                where=key,
                found=f"{file}, without {', '.join(sorted(found['missing_keys'])[:3])}, ...",
                hint="a part of a split file: merge them first (llama-gguf-split --merge)",
            )
        # The weights are no longer quantized, and are not saved as long as the model says so.
        model.config.__dict__.pop("quantization_config", None)
        del model.hf_quantizer
        tokenizer.save_pretrained(temporary)
        model.save_pretrained(temporary)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    except OSError as error:
        raise ResourceError(
            f"the converted model cannot be written: {error.strerror or error}",
            where="data.cache_dir",
            found=folder.parent,
            hint="data.cache_dir=FOLDER on a larger disk",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
