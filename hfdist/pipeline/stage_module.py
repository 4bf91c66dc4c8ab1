"""A stage of a pipeline: the model's own forward, with a stand-in for each of its blocks.

    block      0    1    2  |  3    4    5  |  6    7         this stage owns blocks 3 to 5
    on call   NaN  NaN  recv   real real real, end

A block before the stage returns NaN, in the structure of a real block's output. The last block before the stage returns
what the previous stage sent. The stage's own blocks run. Then the model's forward ends. So all that happens around the
blocks is the model's own code. If anything but the received tensors reaches the loss, the loss is NaN, and `probe`
notices it.

A stage module shares every parameter and buffer with the model that it was made from; only the module objects are new.
A stand-in has the class and the attributes of its block, because models read these from their blocks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import PartitionError
from hfdist.kept_generators import keeping_generators
from hfdist.models.image_text import ImageBatch, image_example
from hfdist.pipeline.image_features import Features, give_features, keep_features
from hfdist.pipeline.stage_forward import BlockPlace, StageEnd, StageForward, keep_first
from hfdist.pipeline.stage_io import Activations, Carry

Standing = TypeVar("Standing", bound=nn.Module)
Block = tuple[nn.Module, ...]
"""The modules that make one transformer block: nearly always one."""


class StageModule(nn.Module):
    """One stage of a model.

    Args:
        model: the whole model's modules; at least this stage's part has parameters.
        blocks: all blocks of `model`.
        stage: the blocks that this stage runs.
        carry: what travels between stages.
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
        if (example := image_example(model)) is not None:
            self._divide_images(example)
        own = {id(p) for index in stage for part in blocks[index] for p in part.parameters()}
        elsewhere = {id(p) for block in blocks for part in block for p in part.parameters()}
        self._own_parameters = tuple(p for p in model.parameters() if id(p) in own or id(p) not in elsewhere)
        for name, (shape, dtype) in fillers.items():
            # One number stands for all elements, so it takes no memory; and no backward looks for it.
            poison = torch.full((), torch.nan, dtype=dtype, device=self._own_parameters[0].device).expand(shape)
            set_parameter(self.model, name, nn.Parameter(poison, requires_grad=False))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Give the parameters that get gradients on this stage: those of its blocks, and those outside all blocks."""
        return iter(self._own_parameters)

    def run(self, call: Callable[[PreTrainedModel], object], incoming: Activations | None) -> Any:
        """Run one forward.

        Args:
            call: calls the model; on the last stage, `run` returns its value.
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

    def _divide_images(self, example: ImageBatch) -> None:
        """Let the first stage alone read images."""
        if self.is_first and example.features:
            keep_features(self.model, partial(self._keep_features, example.features))
        elif example.features:
            give_features(self.model, self._give_features)
        elif not self.is_first:
            for module in {self.model, self.model.base_model}:
                module.register_forward_pre_hook(partial(_leave_out, example.pixels), with_kwargs=True)

    def _keep_features(self, names: Collection[str], features: Features) -> None:
        assert self._stage_forward is not None
        # A later stage needs the shapes alone of the others.
        self._stage_forward.features = {
            name: keep_first(value, None if name in names else 0) for name, value in features.items()
        }

    def _give_features(self) -> Features:
        assert self._stage_forward is not None
        return self._stage_forward.received_features(self._own_parameters[0].device)

    def _call(self, place: BlockPlace, block: nn.Module, *args: object, **kwargs: object) -> object:
        if self._stage_forward is None:
            # Gradient checkpointing runs the block again during backward.
            return block(*args, **kwargs)
        return self._stage_forward.call(place, block, args, kwargs)


def copy_structure(model: PreTrainedModel, blocks: Sequence[Block], call: Callable[..., object]) -> PreTrainedModel:
    """Copy a model's module objects; the copy shares all tensors, and has a stand-in for each module of a block.

    Calling a stand-in is `call(place, original module, *args, **kwargs)`. A forward that was replaced by a function, as
    of an embedding whose rows tensor ranks share, runs the original module, which has the same tensors.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for shared in vars(module).values():
            if isinstance(shared, (PreTrainedConfig, torch.Tensor)):
                memo[id(shared)] = shared
    for index, block in enumerate(blocks):
        for part, module in enumerate(block):
            memo[id(module)] = stand_in(module, partial(call, BlockPlace(index, part), module))
    copied = copy.deepcopy(model, memo)
    for number, hook in list(copied._forward_pre_hooks.items()):
        if hook is refuse_call:
            del copied._forward_pre_hooks[number]
    return copied


def _leave_out(
    names: Collection[str], model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Hook of a later stage: the first one has read the images, and what it sends has their features."""
    return args, {name: value for name, value in kwargs.items() if name not in names}


def refuse_call(model: nn.Module, inputs: object) -> None:
    """Hook of a model that is split: only its stage modules can be called."""
    raise PartitionError(
        "this process holds some stages of a pipeline, so the model cannot be called by itself",
        found=type(model).__name__,
        hint="trainer.save_model(folder), and AutoModelForCausalLM.from_pretrained(folder)",
    )


def stand_in(block: Standing, forward: Callable[..., object]) -> Standing:
    """Copy a module's class and attributes; its hooks, checkpointing and compilation stay with the module itself."""
    # Not `copy.copy`, which an FSDPModule does not allow.
    copied = object.__new__(type(block))
    vars(copied).update(vars(block))
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(copied, name, OrderedDict())
    copied._compiled_call_impl = None
    if hasattr(copied, "gradient_checkpointing"):
        copied.gradient_checkpointing = False  # type: ignore[assignment]  # a plain flag of transformers' layers
    copied.forward = forward
    return copied


def set_parameter(model: nn.Module, name: str, value: nn.Parameter | None) -> None:
    """Put a parameter, or None, under a name of the model."""
    module_name, _, parameter_name = name.rpartition(".")
    model.get_submodule(module_name)._parameters[parameter_name] = value


def modules_of(blocks: Iterable[Block]) -> set[nn.Module]:
    """Give all modules inside of blocks."""
    return {module for block in blocks for part in block for module in part.modules()}


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the random states and all buffers after an extra forward, which may have changed them."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with keeping_generators():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
