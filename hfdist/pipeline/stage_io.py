"""What travels from one stage to the next: tensors, and a description of where they belong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from hfdist.pipeline.image_features import Features


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
        """Describe it for people, for example as `hidden states and the embedding`."""
        names = {Outputs.hidden: "hidden states", Outputs.last: "block outputs", Outputs.history: "all block outputs"}
        return names[self.outputs] + (" and the embedding" if self.embedding else "")


CARRIES = tuple(Carry(outputs, embedding) for outputs in Outputs for embedding in (False, True))
"""All ways to carry, from the least to the most."""


@dataclass(frozen=True)
class Absent:
    """A floating-point tensor that is not sent: NaN takes its place, so that a model that needs it is noticed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def poison(self, device: torch.device) -> torch.Tensor:
        """Give a tensor of NaN in its place. It has real memory, as some models write into what a block returned."""
        return torch.full(self.shape, torch.nan, dtype=self.dtype, device=device)


@dataclass
class Activations:
    """What one stage hands to the next for one micro batch."""

    outputs: dict[str, object] = field(default_factory=dict)
    """What a module of a block returned, in its own structure, by place: `"block.part"`."""
    entries: dict[str, dict[str | int, object]] = field(default_factory=dict)
    """What blocks wrote into their dict and list arguments, by name of the argument and by key."""
    features: Features = field(default_factory=dict)
    """What the first stage has seen in images, where blocks of later stages read it."""

    @property
    def parts(self) -> tuple[object, ...]:
        """All that travels, in the order in which it does."""
        return self.outputs, self.entries, self.features


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
    leaves: tuple[object, ...]
    """A TensorMeta for each tensor, an Absent, or a plain value."""

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        """Metadata of the tensors, in the order in which they travel."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    def pack(self, tensors: tuple[torch.Tensor, ...]) -> Activations:
        """Put received tensors in their places."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        return Activations(*tree_unflatten(leaves, self.spec))

    def to_json(self) -> str:
        """Give the description as text that another process can read."""
        return json.dumps([treespec_dumps(self.spec), [_leaf_to_json(leaf) for leaf in self.leaves]])

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Read what `to_json` wrote."""
        spec, leaves = json.loads(text)
        return cls(treespec_loads(spec), tuple(_leaf_from_json(leaf) for leaf in leaves))


def tensors_of(activations: Activations) -> tuple[torch.Tensor, ...]:
    """Give the tensors, in the order in which they travel."""
    values = tree_leaves(activations.parts)
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def unpack(activations: Activations) -> tuple[Header, tuple[torch.Tensor, ...]]:
    """Take activations apart for sending."""
    values, spec = tree_flatten(activations.parts)
    leaves = tuple(
        TensorMeta(shape=tuple(value.shape), dtype=value.dtype, requires_grad=value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    )
    return Header(spec, leaves), tensors_of(activations)


def _leaf_to_json(leaf: object) -> dict[str, object]:
    match leaf:
        case TensorMeta():
            return {"tensor": leaf.shape, "dtype": _name(leaf.dtype), "requires_grad": leaf.requires_grad}
        case Absent():
            return {"absent": leaf.shape, "dtype": _name(leaf.dtype)}
        case None | bool() | int() | float() | str():
            return {"value": leaf}
        case _:
            raise TypeError(f"blocks return a {type(leaf).__name__}, which cannot travel between processes")


def _leaf_from_json(leaf: dict[str, Any]) -> object:
    match leaf:
        case {"tensor": shape, "dtype": dtype, "requires_grad": requires_grad}:
            return TensorMeta(shape=tuple(shape), dtype=getattr(torch, dtype), requires_grad=requires_grad)
        case {"absent": shape, "dtype": dtype}:
            return Absent(tuple(shape), getattr(torch, dtype))
        case _:
            return leaf["value"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
