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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.errors import PartitionError
from hfdist.kept_generators import keeping_generators
from hfdist.models.image_text import ImageBatch, image_example
from hfdist.pipeline.image_features import Features, give_features, keep_features
from hfdist.pipeline.stage_io import Absent, Activations, Carry, Outputs

Standing = TypeVar("Standing", bound=nn.Module)
Container = MutableMapping[str | int, object] | list[object]
"""What blocks write into: a cache, or a list of what they gave."""
Block = tuple[nn.Module, ...]
"""The modules that make one transformer block: nearly always one."""


class BlockPlace(NamedTuple):
    """The place of a module: its block, and its part of the block. Most blocks have a single part."""

    block: int
    part: int

    def __str__(self) -> str:
        return f"{self.block}.{self.part}"


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
        if (example := image_example(model)) is not None:
            self._divide_images(example)
        own = {id(p) for index in stage for part in blocks[index] for p in part.parameters()}
        elsewhere = {id(p) for block in blocks for part in block for p in part.parameters()}
        self._own = tuple(p for p in model.parameters() if id(p) in own or id(p) not in elsewhere)
        for name, (shape, dtype) in fillers.items():
            # One number stands for all elements, so it takes no memory; and no backward looks for it.
            poison = torch.full((), torch.nan, dtype=dtype, device=self._own[0].device).expand(shape)
            set_parameter(self.model, name, nn.Parameter(poison, requires_grad=False))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Give the parameters that get gradients on this stage: those of its blocks, and those outside all blocks."""
        return iter(self._own)

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
        # Of the others a later stage needs to know the shapes.
        self._stage_forward.features = {
            name: _keep_first(value, None if name in names else 0) for name, value in features.items()
        }

    def _give_features(self) -> Features:
        assert self._stage_forward is not None
        return self._stage_forward.received_features(self._own[0].device)

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
    """All modules inside of blocks."""
    return {module for block in blocks for part in block for module in part.modules()}


class StageEnd(BaseException):
    """Ends the model's forward after the stage's last block. It is not an Exception, because models might catch one."""


class StageForward:
    """The state of one forward of a stage. `num_parts`: modules of a block; `incoming`: None on the first stage.

    On the last stage the model's forward runs to its end.
    """

    def __init__(
        self, blocks: range, num_parts: int, carry: Carry, incoming: Activations | None, *, is_last: bool
    ) -> None:
        self._blocks = blocks
        self._last_part = num_parts - 1
        self._is_last = is_last
        self._carry = carry
        self._incoming = Activations() if incoming is None else incoming
        self._last_called = BlockPlace(-1, 0)
        self._outputs: dict[str, object] = {}
        self._versions: dict[str, list[int]] = {}
        self._entries: dict[str, dict[str | int, object]] = {}
        self._entries_are_delivered = False
        self.features = self._incoming.features
        """What this stage or one before has seen in images, if that travels."""

    def call(
        self, place: BlockPlace, block: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Do what the module at `place` does in this stage.

        Raises:
            StageEnd: the stage is over; `outgoing` is what leaves it.
            PartitionError: the model calls its blocks more than once or out of order.
        """
        has_nothing_to_send = place.block >= self._blocks.stop and not (self._outputs or self._incoming.outputs)
        if place <= self._last_called or has_nothing_to_send:
            before = self._last_called.block
            raise PartitionError(
                "the model does not run its blocks once each and in order",
                found=f"block {place.block} after block {before}" if before >= 0 else f"block {place.block} first",
                hint="a pipeline cannot split this model: choose data parallelism or ZeRO",
            )
        self._last_called = place
        if place.block >= self._blocks.stop:
            raise StageEnd
        if place.block < self._blocks.start:
            return self._earlier(place, args, kwargs)
        output = self._own(place, block, args, kwargs)
        if place == BlockPlace(self._blocks.stop - 1, self._last_part) and not self._is_last:
            # Stop at once: the model may write into the output next, and that is for the next stage.
            raise StageEnd
        return output

    def outgoing(self) -> Activations:
        """Give what the next stage needs from this stage and from those before it.

        Raises:
            PartitionError: the model has written into what a block returned.
        """
        if any(_versions(output) != self._versions[at] for at, output in self._outputs.items()):
            raise PartitionError("the model writes into what its blocks returned")
        entries = {name: dict(items) for name, items in self._incoming.entries.items()}
        for name, items in self._entries.items():
            entries.setdefault(name, {}).update(items)
        outputs = dict(self._outputs)
        if self._carry.outputs is Outputs.history or not outputs:
            # If the model skips all blocks of this stage, the stage sends what it received.
            outputs = self._incoming.outputs | outputs
        return Activations(outputs, entries, self.features)

    def received_features(self, device: torch.device) -> Features:
        """Give copies of the features that were received, and NaN in place of those that were not sent."""
        return {name: _replace(lambda leaf: _received(leaf, device), value) for name, value in self.features.items()}

    def _earlier(self, place: BlockPlace, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        hidden = next(chain.from_iterable(map(_tensors, (*args, *kwargs.values()))))
        device = hidden.device
        sent = self._incoming.outputs.get(str(place))
        if sent is not None:
            self._deliver_entries(args, kwargs)
            return _replace(lambda leaf: _received(leaf, device), sent)
        alike = (value for at, value in self._incoming.outputs.items() if at.endswith(f".{place.part}"))
        return _replace(lambda leaf: _poisoned(leaf, device), next(alike, hidden))

    def _own(
        self, place: BlockPlace, block: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        before = [(name, container, dict(_items(container))) for name, container in _containers(args, kwargs)]
        output = block(*args, **kwargs)
        for name, container, known in before:
            for key, value in _items(container):
                if known.get(key) is not value and _tensors(value):
                    self._entries.setdefault(name, {})[key] = value
        self._remember(place, output)
        return output

    def _remember(self, place: BlockPlace, output: object) -> None:
        if self._carry.outputs is not Outputs.history:
            block = f"{place.block}."
            self._outputs = {at: value for at, value in self._outputs.items() if at.startswith(block)}
        is_hidden_only = self._carry.outputs is Outputs.hidden
        num_kept = 0 if place.part < self._last_part else (1 if is_hidden_only else None)
        self._outputs[str(place)] = _keep_first(output, num_kept)
        self._versions[str(place)] = _versions(self._outputs[str(place)])

    def _deliver_entries(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if self._entries_are_delivered:
            return
        self._entries_are_delivered = True
        containers = dict(_containers(args, kwargs))
        for name, items in self._incoming.entries.items():
            for key, value in items.items():
                _put(containers[name], key, value)


def _keep_first(output: object, number: int | None) -> object:
    """Keep the first floating-point tensors, or all. Other types always travel: NaN cannot take their place."""
    num_seen = 0

    def kept(tensor: torch.Tensor | Absent) -> torch.Tensor | Absent:
        nonlocal num_seen
        if number is None or isinstance(tensor, Absent) or not tensor.is_floating_point():
            return tensor
        num_seen += 1
        return tensor if num_seen <= number else Absent(tuple(tensor.shape), tensor.dtype)

    return _replace(kept, output)


def _versions(output: object) -> list[int]:
    """Give torch's version counters, which grow when a tensor is written into."""
    return [tensor._version for tensor in _tensors(output)]


def _tensors(value: object) -> list[torch.Tensor]:
    # Most values are a tensor, which needs no walk.
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _replace(function: Callable[[torch.Tensor | Absent], object], value: object) -> object:
    """Call a function on each tensor, and on what stands for one."""
    if isinstance(value, (torch.Tensor, Absent)):
        return function(value)
    return tree_map_only((torch.Tensor, Absent), function, value)


def _received(leaf: torch.Tensor | Absent, device: torch.device) -> torch.Tensor:
    # A copy: some models write into what a block returned, but a leaf of the graph must not change.
    return leaf.poison(device) if isinstance(leaf, Absent) else leaf.clone()


def _poisoned(leaf: torch.Tensor | Absent, device: torch.device) -> torch.Tensor:
    if isinstance(leaf, Absent):
        return leaf.poison(device)
    if leaf.is_floating_point():
        return torch.full_like(leaf, torch.nan, requires_grad=False)
    # Integers are indices: the largest integer is an error as an index.
    return leaf if leaf.dtype is torch.bool else torch.full_like(leaf, torch.iinfo(leaf.dtype).max)


def _containers(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[tuple[str, Container]]:
    for name, value in [*((str(i), arg) for i, arg in enumerate(args)), *kwargs.items()]:
        if isinstance(value, (MutableMapping, list)):
            yield name, value


def _items(container: Container) -> Iterator[tuple[str | int, object]]:
    return iter(enumerate(container) if isinstance(container, list) else container.items())


def _put(container: Container, key: str | int, value: object) -> None:
    if isinstance(container, list):
        container.extend([None] * (int(key) + 1 - len(container)))
        container[int(key)] = value
    else:
        container[key] = value


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
