"""Tries an adapter on a model whose weights have no values, so that a mistake is told before weights are read."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from hfdist.apart import do_apart
from hfdist.config.model import AdapterConfig, AdapterPart, ModelConfig
from hfdist.config.task import Head
from hfdist.models.adapter import add_adapter
from hfdist.models.adapter_parts import aim_at_parts
from hfdist.models.build import make_without_values
from hfdist.models.partitioning import WHOLE
from hfdist.models.peft_config import make_peft_config


def try_adapter(
    config: ModelConfig, architecture: PreTrainedConfig, adapter: AdapterConfig, *, head: Head = Head.tokens
) -> None:
    """Put an adapter into the model without values, if parts, a pattern or a saved adapter choose its layers.

    Other mistakes of an adapter are told when it is put into the model with weights.

    Args:
        config: the run's config of the model.
        architecture: the model's config, as `find_architecture` gives it.
        adapter: the keys of the adapter.
        head: what the model gives at its end.

    Raises:
        ConfigError: the model has no matrices of a part, or the adapter takes more time or memory than any adapter
            needs.
    """
    if adapter.target_parts is not None:
        _try_parts(config, copy.deepcopy(architecture), adapter, adapter.target_parts, head=head)
    if adapter.path is not None:
        where, found = "adapter.path", f"{adapter.path}/adapter_config.json"
    elif adapter.target_pattern is not None:
        where, found = "adapter.target_pattern", adapter.target_pattern
    else:
        return

    def put() -> None:
        with torch.device("meta"):
            model = make_without_values(config, architecture, head=head)
            try:
                add_adapter(model, adapter, config, seed=0, layout=WHOLE)
            except MemoryError:
                raise
            except Exception:  # told when the adapter is put into the model with weights
                return

    # It has a process of its own: a pattern may take time without end, and sizes in a file may take memory.
    do_apart(put, where=where, found=found)


def _try_parts(
    config: ModelConfig,
    architecture: PreTrainedConfig,
    adapter: AdapterConfig,
    parts: Sequence[AdapterPart],
    *,
    head: Head,
) -> None:
    """Check that the model has matrices of these parts, and that PEFT can adapt them."""
    with torch.device("meta"):
        model = make_without_values(config, architecture, head=head)
        peft_config = make_peft_config(adapter)
        aim_at_parts(model, peft_config, parts)
        if getattr(peft_config, "target_parameters", None):
            # PEFT refuses more beside single parameters, so it is asked. Beside layers it is not: some first weights
            # cannot be made without values.
            add_adapter(model, adapter, config, seed=0, layout=WHOLE)
