"""The stages of a pipeline in one process, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.split import SplitModel, split_at_blocks
from hfdist.pipeline.stage_io import Activations, Carry, Header, unpack


class Loopback:
    """A link between stages of one process: what is sent is described, detached and put together again."""

    def __init__(self):
        self._activations: dict[int, Activations | None] = {}

    def send(self, stage, activations):
        self._activations[stage] = None if activations is None else travel(activations)

    def receive(self, stage):
        return self._activations.pop(stage)

    def flush(self):
        pass


def travel(activations: Activations) -> Activations:
    """Give what the next stage receives: leaves, with the description that went through JSON."""
    header, tensors = unpack(activations)
    copies = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)
    return Header.from_json(header.to_json()).pack(copies)


def cut_stages(make: Callable[[], PreTrainedModel], stages: tuple[range, ...], carry: Carry) -> list[SplitModel]:
    """Give one cut model for each stage, as on one rank each, that holds what `carry` asks."""
    cuts = []
    for stage in range(len(stages)):
        whole, model = make(), make()
        cut = split_at_blocks(model, find_block_parts(model), stages, [stage])
        if carry.embedding and cut.embedding in cut.removed:
            cut.restore(cut.embedding, whole.get_parameter(cut.embedding).detach())
        cuts.append(cut)
    return cuts


def loss_of(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """Call a model that returns its loss by name or first."""
    outputs = model(**batch)
    return outputs[0] if isinstance(outputs, tuple) else outputs["loss"]
