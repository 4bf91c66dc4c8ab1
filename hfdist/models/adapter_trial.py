"""An adapter tried on a model without values, before weights are read."""

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
    """Put an adapter into the model without values, where parts, a pattern or a file choose its layers.

    What else is wrong with it is told when it is put into the model.

    Raises:
        ConfigError: the model has nothing of a part, or the adapter takes more than any adapter needs.
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
            except Exception:  # told later
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
    with torch.device("meta"):
        model = make_without_values(config, architecture, head=head)
        aim_at_parts(model, peft_config := make_peft_config(adapter), parts)
        if getattr(peft_config, "target_parameters", None):
            # PEFT puts less beside single parameters; some first weights are not made without values.
            add_adapter(model, adapter, config, seed=0, layout=WHOLE)
