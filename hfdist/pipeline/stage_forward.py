"""One micro batch on its way through one stage: what happens where the model calls one of its blocks.

    block      0    1    2  |  3    4    5  |  6    7         this stage owns blocks 3 to 5
    on call   NaN  NaN  recv   real real real, end

A block before the stage returns NaN, in the structure of a real block's output; the last one before it returns what
the previous stage sent; the stage's own blocks run; then the model's forward ends. So whatever the model does around
its blocks is its own code, and anything but the received tensors that reaches the loss makes it NaN, which `probe`
notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hfdist.errors import PartitionError
from hfdist.pipeline.stage_io import Absent, Activations, Carry, Outputs


@dataclass(frozen=True, order=True)
class Place:
    """Which module of which block. Most blocks are one module; some models keep several lists side by side."""

    block: int
    part: int

    def __str__(self) -> str:
        return f"{self.block}.{self.part}"


class StageEnd(BaseException):
    """Ends the model's forward after the stage's last block. Not an Exception, which models might catch."""


class StageForward:
    """Made anew for each forward.

    Args:
        blocks: the blocks of this stage.
        num_parts: modules of one block.
        carry: what leaves the stage.
        incoming: what the previous stage sent; None on the first stage.
        is_last: whether the model's forward goes on to its end.
    """

    def __init__(
        self, blocks: range, num_parts: int, carry: Carry, incoming: Activations | None, *, is_last: bool
    ) -> None:
        self._blocks = blocks
        self._last_part = num_parts - 1
        self._is_last = is_last
        self._carry = carry
        self._incoming = Activations() if incoming is None else incoming
        self._last_called = Place(-1, 0)
        self._outputs: dict[str, Any] = {}
        self._versions: dict[str, list[int]] = {}
        self._entries: dict[str, dict[str | int, Any]] = {}
        self._entries_are_delivered = False

    def call(self, place: Place, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        if place == Place(self._blocks.stop - 1, self._last_part) and not self._is_last:
            # At once: what the model does with the output is up to the next stage, and may be done in place.
            raise StageEnd
        return output

    def outgoing(self) -> Activations:
        """What the next stage needs of this one and of those before.

        Raises:
            PartitionError: it has changed since a block returned it.
        """
        if any(_versions(output) != self._versions[at] for at, output in self._outputs.items()):
            raise PartitionError("the model writes into what its blocks returned")
        entries = {name: dict(items) for name, items in self._incoming.entries.items()}
        for name, items in self._entries.items():
            entries.setdefault(name, {}).update(items)
        outputs = dict(self._outputs)
        if self._carry.outputs is Outputs.history or not outputs:
            # Not of this stage if the model skips all its blocks.
            outputs = self._incoming.outputs | outputs
        return Activations(outputs, entries)

    def _earlier(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        sent = self._incoming.outputs.get(str(place))
        if sent is not None:
            self._deliver_entries(args, kwargs)
            # A copy: some models write into what a block returned, and a leaf of the graph must stay as it is.
            return tree_map_only((torch.Tensor, Absent), lambda leaf: _arrived(leaf, hidden.device), sent)
        alike = (value for at, value in self._incoming.outputs.items() if at.endswith(f".{place.part}"))
        return tree_map_only((torch.Tensor, Absent), lambda leaf: _poisoned(leaf, hidden.device), next(alike, hidden))

    def _own(self, place: Place, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = {name: dict(_items(container)) for name, container in _containers(args, kwargs)}
        output = block(*args, **kwargs)
        for name, container in _containers(args, kwargs):
            known = before.get(name, {})
            for key, value in _items(container):
                if known.get(key) is not value and _has_tensor(value):
                    self._entries.setdefault(name, {})[key] = value
        self._remember(place, output)
        return output

    def _remember(self, place: Place, output: Any) -> None:
        if self._carry.outputs is not Outputs.history:
            block = f"{place.block}."
            self._outputs = {at: value for at, value in self._outputs.items() if at.startswith(block)}
        keep = "none" if place.part < self._last_part else ("first" if self._is_hidden_only else "all")
        self._outputs[str(place)] = _without(output, keep)
        self._versions[str(place)] = _versions(self._outputs[str(place)])

    @property
    def _is_hidden_only(self) -> bool:
        return self._carry.outputs is Outputs.hidden

    def _deliver_entries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._entries_are_delivered:
            return
        self._entries_are_delivered = True
        containers = dict(_containers(args, kwargs))
        for name, items in self._incoming.entries.items():
            for key, value in items.items():
                _put(containers[name], key, value)


def _without(output: Any, keep: str) -> Any:
    """Replace floating-point tensors that are not kept. Others always travel: there is no NaN to put in their place."""
    remaining = {"none": 0, "first": 1, "all": None}[keep]

    def kept(tensor: torch.Tensor) -> torch.Tensor | Absent:
        nonlocal remaining
        if remaining is None or not tensor.is_floating_point():
            return tensor
        if remaining > 0:
            remaining -= 1
            return tensor
        return Absent(tuple(tensor.shape), tensor.dtype)

    return tree_map_only(torch.Tensor, kept, output)


def _versions(output: Any) -> list[int]:
    """Numbers that grow when tensors are written into."""
    return [leaf._version for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _arrived(leaf: torch.Tensor | Absent, device: torch.device) -> torch.Tensor:
    return leaf.poison(device) if isinstance(leaf, Absent) else leaf.clone()


def _poisoned(leaf: torch.Tensor | Absent, device: torch.device) -> torch.Tensor:
    if isinstance(leaf, Absent):
        return leaf.poison(device)
    if leaf.is_floating_point():
        return torch.full_like(leaf, torch.nan, requires_grad=False)
    # Integers are indices: as an index this one is an error.
    return leaf if leaf.dtype is torch.bool else torch.full_like(leaf, torch.iinfo(leaf.dtype).max)


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in [*((str(i), arg) for i, arg in enumerate(args)), *kwargs.items()]:
        if isinstance(value, (MutableMapping, list)):
            yield name, value


def _items(container: Any) -> Iterator[tuple[str | int, Any]]:
    return iter(enumerate(container) if isinstance(container, list) else container.items())


def _put(container: Any, key: str | int, value: Any) -> None:
    if isinstance(container, list):
        container.extend([None] * (int(key) + 1 - len(container)))
        container[int(key)] = value
    else:
        container[key] = value


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
