"""A stage: the model's own forward with stand-ins for its blocks.

A view shares every parameter and buffer with the model that it was made of; only the module objects are new. In place
of each block it has a stand-in: same class and attributes, since models read those off their blocks, but calling it
asks the stage_forward what to do.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import PartitionError
from hfdist.pipeline.stage_forward import Place, StageEnd, StageForward
from hfdist.pipeline.stage_io import Activations, Carry

Block = tuple[nn.Module, ...]
"""The modules that make one transformer block: nearly always one."""


class StageModule(nn.Module):
    """One stage of a model.

    Args:
        model: with parameters for at least this stage's part.
        blocks: all blocks of `model`.
        stage: the blocks that this stage runs.
        carry: what travels.
        fillers: shapes and types of parameters outside the blocks that this rank does not hold, by name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[Block],
        stage: range,
        carry: Carry,
        fillers: dict[str, tuple[torch.Size, torch.dtype]],
    ) -> None:
        super().__init__()
        self.stage = stage
        self.is_first = stage.start == 0
        self.is_last = stage.stop == len(blocks)
        self._carry = carry
        self._num_parts = len(blocks[0])
        self._stage_forward: StageForward | None = None
        self.model = copy_structure(model, blocks, self._call)
        own = {id(p) for index in stage for part in blocks[index] for p in part.parameters()}
        elsewhere = {id(p) for block in blocks for part in block for p in part.parameters()}
        self._own = tuple(p for p in model.parameters() if id(p) in own or id(p) not in elsewhere)
        _fill(self.model, fillers, next(iter(self._own)).device)

    def parameters(self, recurse: bool = True) -> Any:
        """Those that this stage can give a gradient to: of its blocks, and of what surrounds all blocks."""
        return iter(self._own)

    def run(self, call: Callable[[PreTrainedModel], Any], incoming: Activations | None) -> Activations | Any:
        """Run one forward.

        Args:
            call: calls the model; on the last stage its value is given back.
            incoming: what the previous stage sent; None on the first stage.

        Returns:
            What goes to the next stage; on the last stage, the value of `call`.

        Raises:
            PartitionError: the model does not run its blocks one after the other.
        """
        stage_forward = StageForward(self.stage, self._num_parts, self._carry, incoming, is_last=self.is_last)
        self._stage_forward = stage_forward
        try:
            value = call(self.model)
        except StageEnd:
            return stage_forward.outgoing()
        finally:
            self._stage_forward = None
        if self.is_last:
            return value
        raise PartitionError("the model ends before it has called all its blocks", found=f"blocks up to {self.stage}")

    def _call(self, place: Place, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._stage_forward is None:
            # Gradient checkpointing runs the block again during backward.
            return block(*args, **kwargs)
        return self._stage_forward.call(place, block, args, kwargs)


def copy_structure(model: PreTrainedModel, blocks: Sequence[Block], call: Callable[..., Any]) -> PreTrainedModel:
    """Copy a model's module objects, with all its tensors shared and a stand-in for each module of a block.

    Args:
        model: of any kind.
        blocks: its blocks.
        call: what calling a stand-in does: (place, original module, *args, **kwargs).
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for shared in vars(module).values():
            if isinstance(shared, (PreTrainedConfig, torch.Tensor)):
                memo[id(shared)] = shared
    for index, block in enumerate(blocks):
        for part, module in enumerate(block):
            memo[id(module)] = _stand_in(module, partial(call, Place(index, part), module))
    view = copy.deepcopy(model, memo)
    for number, hook in list(view._forward_pre_hooks.items()):
        if hook is refuse_call:
            del view._forward_pre_hooks[number]
    return view


def refuse_call(model: nn.Module, inputs: Any) -> None:
    """A hook for a cut model, whose views can be called in its stead."""
    raise PartitionError(
        "this process holds some stages of a pipeline, so the model cannot be called by itself",
        found=type(model).__name__,
        hint="trainer.save_model(folder), and AutoModelForCausalLM.from_pretrained(folder)",
    )


def _stand_in(block: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """The same class and attributes; hooks, checkpointing and compilation stay with the block that it calls."""
    stand_in = copy.copy(block)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(stand_in, name, OrderedDict())
    stand_in._compiled_call_impl = None
    if hasattr(stand_in, "gradient_checkpointing"):
        stand_in.gradient_checkpointing = False  # type: ignore[assignment]  # a plain flag of transformers' layers
    stand_in.forward = forward
    return stand_in


def _fill(view: PreTrainedModel, fillers: dict[str, tuple[torch.Size, torch.dtype]], device: torch.device) -> None:
    """Put NaN where this rank has no parameter. One number stands for all elements, so it takes no memory."""
    for name, (shape, dtype) in fillers.items():
        module_name, _, parameter_name = name.rpartition(".")
        poison = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        view.get_submodule(module_name)._parameters[parameter_name] = nn.Parameter(poison)


def modules_of(blocks: Iterable[Block]) -> set[nn.Module]:
    """All modules inside of blocks."""
    return {module for block in blocks for part in block for module in part.modules()}
