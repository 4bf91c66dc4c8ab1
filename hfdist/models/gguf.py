"""Converts a GGUF file to a model's folder in the cache, once on a machine."""

from __future__ import annotations

import hashlib
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.apart import Limits, do_apart
from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.once import make_once

logger = logging.getLogger(__name__)

_FORMAT = 2
"""Version of converted folders, to be raised when `_write` writes other contents."""
_SAMPLE_BYTES = 1 << 20
"""Bytes of both ends of a file by which it is known again."""


def convert_gguf(file: Path, cache_dir: Path, *, key: str) -> Path:
    """Give a folder with the file's weights in float32, its config and its tokenizer; it is made if it is not there.

    The weights are converted whole, in one process of a machine, while the others wait: about six bytes of memory a
    parameter for its time, and 4 bytes of disk a parameter for good. Afterwards each process maps the folder, and reads
    what it keeps.

    Args:
        file: a GGUF file of an architecture that transformers can read.
        cache_dir: folder of converted files, which all processes of the machine share.
        key: the config key that names the file, for messages.

    Returns:
        The folder, which `from_pretrained` reads.

    Raises:
        ConfigError: the package `gguf` is missing, or the file is damaged or of a kind that transformers cannot read.
        ResourceError: the disk is full.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            "the package gguf is missing, which reads this file", where=key, found=file, hint="pip install gguf"
        )
    if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", file.name):
        hint = "merge them first: llama-gguf-split --merge FIRST_PART MERGED.gguf"
        raise ConfigError("this is a part of a split file", where=key, found=file, hint=hint)
    # Another version of transformers may read the file otherwise, so it gets a folder of its own.
    status = file.stat()
    identity = f"{_FORMAT} {transformers.__version__} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.blake2b(identity.encode(), digest_size=12)
    with file.open("rb") as content:
        digest.update(content.read(_SAMPLE_BYTES))
        content.seek(max(0, status.st_size - _SAMPLE_BYTES))
        digest.update(content.read(_SAMPLE_BYTES))
    folder = cache_dir / "gguf" / f"{file.stem}-{digest.hexdigest()}"

    def write(temporary: Path) -> None:
        logger.info("converting %s to safetensors in float32, once", file)
        # transformers does not read all of a tokenizer from GGUF: not how spaces before digits are split, for one.
        logger.info("its tokenizer is rebuilt; model.tokenizer.name=ID of the original takes the exact one")
        limits = _limits(status.st_size)
        do_apart(lambda: _write(file, temporary, key), where=key, found=file, limits=limits)

    return make_once(folder, write)


def _limits(num_bytes: int) -> Limits:
    """Give the limits of the process that converts a GGUF file of so many bytes.

    With two bits a parameter, the least there is, each byte of the file takes up to 24 bytes of memory: 32 are allowed,
    and a second of CPU time for each megabyte.
    """
    return Limits(
        cpu_seconds=120 + num_bytes // 10**6,
        memory_bytes=4 * 2**30 + 32 * num_bytes,
        wall_seconds=900 + num_bytes / 10**5,
    )


def _write(file: Path, folder: Path, key: str) -> None:
    """Convert the file into an empty folder."""
    with reading_from_hub(key, str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32", output_loading_info=True
        )
    model, found = loaded
    # The weights are no longer quantized; transformers would not save them while the model says that they are.
    model.config.__dict__.pop("quantization_config", None)
    del model.hf_quantizer
    tokenizer.save_pretrained(folder)
    # Weights that the file lacks are random here, and are left out: whoever reads the folder finds them missing.
    missing = found["missing_keys"]
    weights = {name: value for name, value in model.state_dict().items() if name not in missing}
    model.save_pretrained(folder, state_dict=weights)
