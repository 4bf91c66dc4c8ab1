"""What travels from one stage to the next: tensors, and a description of where they belong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads


class Outputs(Enum):
    """Which outputs of blocks a model's later blocks, or its head, need."""

    hidden = "hidden"
    """The first tensor of the last block's output: the hidden states."""
    last = "last"
    """All outputs of the last block."""
    history = "history"
    """All outputs of all blocks so far."""


@dataclass(frozen=True)
class Carry:
    """What must reach a stage from outside, found by trying: see `probe`."""

    outputs: Outputs
    embedding: bool
    """Whether every stage needs the real input embedding."""

    def describe(self) -> str:
        """For people, for example `hidden states and the embedding`."""
        names = {Outputs.hidden: "hidden states", Outputs.last: "block outputs", Outputs.history: "all block outputs"}
        return names[self.outputs] + (" and the embedding" if self.embedding else "")


CARRIES = tuple(Carry(outputs, embedding) for outputs in Outputs for embedding in (False, True))
"""From the least to the most."""


@dataclass(frozen=True)
class Absent:
    """A floating-point tensor that stayed behind: NaN takes its place, so that a model that needs it is noticed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def poison(self, device: torch.device) -> torch.Tensor:
        """NaN of the same shape. Real memory, since some models write into what a block returned."""
        return torch.full(self.shape, torch.nan, dtype=self.dtype, device=device)


@dataclass
class Activations:
    """What one stage hands to the next for one micro batch."""

    outputs: dict[str, Any] = field(default_factory=dict)
    """What a module of a block returned, in its own structure, by place: `"block.part"`."""
    entries: dict[str, dict[str | int, Any]] = field(default_factory=dict)
    """What blocks wrote into their dict and list arguments, by name of the argument and by key."""


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What must be known of a tensor before it can be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Header:
    """Everything of activations but their tensors: the receiver can allocate, and put them together again."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """A TensorMeta for each tensor, an Absent, or a plain value."""

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """Of the tensors, in the order in which they travel."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    def pack(self, tensors: tuple[torch.Tensor, ...]) -> Activations:
        """Put received tensors in their places."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        outputs, entries = tree_unflatten(leaves, self.spec)
        return Activations(outputs, entries)

    def to_json(self) -> str:
        """As text that another process can read."""
        return json.dumps([treespec_dumps(self.spec), [_leaf_to_json(leaf) for leaf in self.leaves]])

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Read what `to_json` wrote."""
        spec, leaves = json.loads(text)
        return cls(treespec_loads(spec), tuple(_leaf_from_json(leaf) for leaf in leaves))


def unpack(activations: Activations) -> tuple[Header, tuple[torch.Tensor, ...]]:
    """Take activations apart for sending."""
    values, spec = tree_flatten((activations.outputs, activations.entries))
    tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
    leaves = tuple(_meta(value) if isinstance(value, torch.Tensor) else value for value in values)
    return Header(spec, leaves), tensors


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def _leaf_to_json(leaf: Any) -> dict[str, Any]:
    match leaf:
        case TensorMeta():
            return {"tensor": leaf.shape, "dtype": _name(leaf.dtype), "requires_grad": leaf.requires_grad}
        case Absent():
            return {"absent": leaf.shape, "dtype": _name(leaf.dtype)}
        case None | bool() | int() | float() | str():
            return {"value": leaf}
        case _:
            raise TypeError(f"blocks return a {type(leaf).__name__}, which cannot travel between processes")


def _leaf_from_json(leaf: dict[str, Any]) -> Any:
    match leaf:
        case {"tensor": shape, "dtype": dtype, "requires_grad": requires_grad}:
            return TensorMeta(shape=tuple(shape), dtype=getattr(torch, dtype), requires_grad=requires_grad)
        case {"absent": shape, "dtype": dtype}:
            return Absent(tuple(shape), getattr(torch, dtype))
        case _:
            return leaf["value"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
