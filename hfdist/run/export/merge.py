"""Writes the whole model with an adapter merged into it: PEFT opens and merges it, in one process, on the CPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hfdist.checkpoint.export import replace_model
from hfdist.config.model import ModelConfig
from hfdist.config.task import Head
from hfdist.models.heads import head_class
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.names.weight_names import without_report
from hfdist.trainer.checkpointing.model_files import write_hub_files

logger = logging.getLogger(__name__)


def write_merged(
    adapter: Path,
    folder: Path,
    *,
    base: ModelConfig,
    config: PreTrainedConfig,
    generation: GenerationConfig | None,
    tokenizer: object,
    head: Head = Head.tokens,
    write_more: Callable[[Path], None] | None = None,
) -> bool:
    """Open the base as it is in its files, merge a PEFT folder, and write a Hub model of the base's type.

    Args:
        adapter: PEFT folder of the adapter.
        folder: the folder to write, in place of an older model there.
        base: the model that the adapter was trained beside.
        config: config of the trained model.
        generation: generation config of the trained model; None: it has none.
        tokenizer: tokenizer of the trained model.
        head: what the model gives at its end.
        write_more: adds files to a folder; None: there are no more.

    Returns:
        Whether PEFT can merge this adapter; otherwise nothing is written, and the log says why.
    """
    try:
        merged = _open_merged(adapter, base, config, head)
    except (NotImplementedError, ValueError) as error:
        logger.warning("PEFT cannot merge %s: %s; PeftModel.from_pretrained(model, folder) opens it", adapter, error)
        return False
    # transformers refuses to write some generation configs, and the weights with them: it is written afterwards.
    merged.generation_config = GenerationConfig()

    def write(unfinished: Path) -> None:
        merged.save_pretrained(unfinished)
        if generation is not None:
            merged.generation_config = generation
        write_hub_files(merged, tokenizer, unfinished)
        if write_more is not None:
            write_more(unfinished)

    replace_model(folder, write)
    return True


def _open_merged(adapter: Path, base: ModelConfig, config: PreTrainedConfig, head: Head) -> PreTrainedModel:
    """Open the base and merge the adapter; NotImplementedError, ValueError: PEFT cannot merge it."""
    # Imported late: PEFT need not be installed.
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert base.name is not None  # checked with the config
    with reading_from_hub("model.name", base.name), without_report():
        # The type in the files: under ZeRO-3 the config has the type in which they were read.
        dtype = AutoConfig.from_pretrained(base.name, trust_remote_code=base.trust_remote_code).dtype
        model = head_class(head, config).auto.from_pretrained(
            base.name,
            config=config,
            revision=base.revision,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=base.trust_remote_code,
        )
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = PeftModel.from_pretrained(model, str(adapter))
        for layer in list(opened.modules()):
            if isinstance(layer, BaseTunerLayer):
                # In float32, one layer at a time, so that the sum is rounded once.
                weights = layer.get_base_layer()
                dtype = next(weights.parameters()).dtype
                weights.to(torch.float32)
                layer.merge(safe_merge=True)
                weights.to(dtype)
        merged = opened.merge_and_unload()
    for name, parameter in merged.named_parameters():
        # Modules that were trained whole are in float32; an untied head has a name of its own now.
        parameter.data = parameter.data.to(dtypes.get(name, model.dtype))
    return merged
