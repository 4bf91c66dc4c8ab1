"""Split a model at its blocks: a rank keeps those of its own stages, and of the rest only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.models.blocks import find_block_parts
from hfdist.models.embeddings import input_embeddings
from hfdist.pipeline.stage_io import Carry
from hfdist.pipeline.stage_module import Block, StageModule, modules_of, set_parameter


@dataclass(frozen=True)
class Removed:
    """What is known of a parameter that this rank does not hold."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    names: tuple[str, ...]
    """All names that it is tied to."""


@dataclass
class SplitModel:
    """A model of which this rank holds the parameters of some stages, under the names of the whole."""

    model: PreTrainedModel
    blocks: Sequence[Block]
    stages: tuple[range, ...]
    """The blocks of every stage of the pipeline."""
    mine: tuple[int, ...]
    """The stages of this rank."""
    embedding: str | None
    """Name of the input embedding's weight, also where a tied head gives it another first name."""
    removed: dict[str, Removed] = field(default_factory=dict)
    """Parameters outside the blocks that this rank does not hold, by name."""
    samples: dict[tuple[torch.dtype, bool], nn.Parameter] = field(default_factory=dict)
    """A parameter of the blocks for each type and side (trained or frozen) that there was when the model was split."""

    @property
    def has_first(self) -> bool:
        """Whether the first stage, with the prologue, is on this rank."""
        return 0 in self.mine

    @property
    def has_last(self) -> bool:
        """Whether the last stage, with the head and the loss, is on this rank."""
        return len(self.stages) - 1 in self.mine

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled in place."""
        return any(part._compiled_call_impl is not None for block in self.blocks for part in block)

    def stage_module(self, stage: int, carry: Carry) -> StageModule:
        """Make the module that runs one of this rank's stages."""
        fillers = {name: (removed.shape, self.type_of(removed)) for name, removed in self.removed.items()}
        if self.embedding is not None and stage != 0 and not carry.embedding and self.embedding not in fillers:
            # Held here for a tied head or for another stage, but not to be looked up in this one.
            weight = self.model.get_parameter(self.embedding)
            fillers[self.embedding] = (weight.shape, weight.dtype)
        return StageModule(self.model, self.blocks, self.stages[stage], carry, fillers)

    def type_of(self, removed: Removed) -> torch.dtype:
        """Give the type that a removed parameter would have by now: models are converted once they are split."""
        # A parameter that had the same type went the same way, most likely one that is trained or frozen as it is.
        for requires_grad in (removed.requires_grad, not removed.requires_grad):
            sample = self.samples.get((removed.dtype, requires_grad))
            if sample is not None:
                return sample.dtype
        return removed.dtype

    def surrounding(self) -> dict[str, nn.Parameter]:
        """Give the parameters outside the blocks that this rank holds, by name; tied ones once."""
        inside = {id(p) for block in self.blocks for part in block for p in part.parameters()}
        return {name: p for name, p in self.model.named_parameters() if id(p) not in inside}

    def remove(self, names: Iterable[str]) -> None:
        """Free parameters outside the blocks, under all the names that they are tied to."""
        for parameter in [self.model.get_parameter(name) for name in names]:
            tied = [name for name, other in self.model.named_parameters(remove_duplicate=False) if other is parameter]
            for name in tied:
                self.removed[name] = Removed(parameter.shape, parameter.dtype, parameter.requires_grad, tuple(tied))
                set_parameter(self.model, name, None)

    def restore(self, name: str, value: torch.Tensor) -> None:
        """Hold a removed parameter again, under all its names."""
        was = self.removed[name]
        parameter = nn.Parameter(value, requires_grad=was.requires_grad)
        for tied in was.names:
            del self.removed[tied]
            set_parameter(self.model, tied, parameter)


def split_at_blocks(
    model: PreTrainedModel, blocks: Sequence[Block], stages: tuple[range, ...], mine: Sequence[int]
) -> SplitModel:
    """Remove from `model`, in place, the other ranks' blocks, and the embedding and the head where they cannot run.

    What else surrounds the blocks stays until `probe` knows what is needed. The model's memory may be untouched (a
    file's pages, or not initialized): nothing is read.
    """
    local = {index for stage in mine for index in stages[stage]}
    own = [block for index, block in enumerate(blocks) if index in local]
    foreign = modules_of(b for i, b in enumerate(blocks) if i not in local) - modules_of(own)
    outside = set(model.modules()) - foreign
    shared = {id(p) for module in outside for p in module.parameters(recurse=False)}
    saved = model.state_dict()
    persistent = {id(buffer) for name, buffer in model.named_buffers() if name in saved}
    for module in foreign:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in shared:
                module._parameters[name] = None
        for name, buffer in module._buffers.items():
            if id(buffer) in persistent:
                module._buffers[name] = None
    embedding, head = (_weight_name(model, m) for m in (input_embeddings(model), model.get_output_embeddings()))
    split = SplitModel(model, blocks, stages, tuple(mine), embedding)
    for parameter in (p for block in own for part in block for p in part.parameters()):
        split.samples.setdefault((parameter.dtype, parameter.requires_grad), parameter)
    is_tied = embedding is not None and head is not None and model.get_parameter(embedding) is model.get_parameter(head)
    if embedding is not None and not (split.has_first or (is_tied and split.has_last)):
        split.remove([embedding])
    if head is not None and not is_tied and not split.has_last:
        split.remove([head])
    return split


def stages_of_one_block(model: PreTrainedModel, carry: Carry) -> list[StageModule]:
    """Make each block of a model that stays whole a stage by itself, all on this rank."""
    blocks = find_block_parts(model)
    split = split_at_blocks(model, blocks, tuple(range(i, i + 1) for i in range(len(blocks))), range(len(blocks)))
    return [split.stage_module(stage, carry) for stage in split.mine]


def run_in_turn(stages: Sequence[StageModule], call: Callable[[PreTrainedModel], Any]) -> Any:
    """Run one forward through stages of this rank, in one graph; give the value of `call` on the last one."""
    value = None
    for stage in stages:
        value = stage.run(call, value)
    return value


def _weight_name(model: PreTrainedModel, module: nn.Module | None) -> str | None:
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, nn.Parameter):
        return None
    owner = next(name for name, other in model.named_modules() if other is module)
    # Directly in it, or deeper where an adapter is wrapped around it.
    named = model.named_parameters(remove_duplicate=False)
    return next(name for name, other in named if other is weight and name.startswith(f"{owner}."))
