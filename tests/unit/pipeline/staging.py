"""Run the stages of a pipeline one after the other in one process, beside the whole model."""

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


def staged_step(
    cuts: list[SplitModel], carry: Carry, batch: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run one forward and backward through all stages; give the loss, and the gradients summed by name."""
    sent: list[tuple[torch.Tensor, ...]] = []
    received: list[tuple[torch.Tensor, ...]] = []
    incoming = None
    for stage, cut in enumerate(cuts):
        value = cut.stage_module(stage, carry).run(lambda model: loss_of(model, batch), incoming)
        if stage < len(cuts) - 1:
            incoming = travel(value)
            sent.append(unpack(value)[1])
            received.append(unpack(incoming)[1])
    value.backward()
    for outputs, arrived in zip(reversed(sent), reversed(received), strict=True):
        pairs = [(o, a.grad) for o, a in zip(outputs, arrived, strict=True) if a.grad is not None]
        torch.autograd.backward([o for o, _ in pairs], [grad for _, grad in pairs])
    gradients: dict[str, torch.Tensor] = {}
    for cut in cuts:
        for name, parameter in cut.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return value.detach(), gradients


def loss_of(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """Call a model that returns its loss by name or first."""
    outputs = model(**batch)
    return outputs[0] if isinstance(outputs, tuple) else outputs["loss"]


def whole_step(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same in one piece."""
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
