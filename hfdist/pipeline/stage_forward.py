"""One forward of a stage: what each block gives in it, and what goes on to the next stage.

A block before the stage gives NaN, or what the stage before has sent. A block of the stage runs. After the last one the
model's forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hfdist.errors import PartitionError
from hfdist.pipeline.image_features import Features
from hfdist.pipeline.stage_io import Absent, Activations, Carry, Outputs

Container = MutableMapping[str | int, object] | list[object]
"""What blocks write into: a cache, or a list of what they gave."""


class BlockPlace(NamedTuple):
    """The place of a module: its block, and its part of the block. Most blocks have a single part."""

    block: int
    part: int

    def __str__(self) -> str:
        return f"{self.block}.{self.part}"


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
        output = self._run(place, block, args, kwargs)
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
        same_part = (value for at, value in self._incoming.outputs.items() if at.endswith(f".{place.part}"))
        return _replace(lambda leaf: _poisoned(leaf, device), next(same_part, hidden))

    def _run(
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
        self._outputs[str(place)] = keep_first(output, num_kept)
        self._versions[str(place)] = _versions(self._outputs[str(place)])

    def _deliver_entries(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if self._entries_are_delivered:
            return
        self._entries_are_delivered = True
        containers = dict(_containers(args, kwargs))
        for name, items in self._incoming.entries.items():
            for key, value in items.items():
                _put(containers[name], key, value)


def keep_first(output: object, number: int | None) -> object:
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
