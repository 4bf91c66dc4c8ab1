"""What travels from one stage to the next: tensors, a description of where they belong, and the channel for both."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from hfdist.collectives import device_of
from hfdist.pipeline.image_features import Features
from hfdist.pipeline.sends import Sends


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
        """NaN of the same shape. Real memory, since some models write into what a block returned."""
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


class P2PChannel:
    """Sends activations from stage to stage together with their description, where shapes are not yet known.

    Stages on one rank hand over directly. `rank_of_stage` has places in `group`, the ranks of one pipeline.
    """

    def __init__(self, rank_of_stage: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank_of_stage = rank_of_stage
        self.group = group
        self.device = device
        # The model may still be on the host while the network only takes what is on a GPU.
        self._network_device = device if device.type == "cuda" else device_of(group)
        self._own_rank = dist.get_rank(group)
        self.receives_early = dist.get_backend(group) == "gloo"
        """Whether a receive that waits holds up nothing else."""
        self._handed_over: dict[int, deque[Activations | None]] = defaultdict(deque)
        self._sends = Sends(tells=dist.get_backend(group) != "gloo")

    def send(self, stage: int, activations: Activations | None) -> None:
        """Send to `stage`, without waiting. None says that there is none: an earlier stage failed."""
        header, tensors = (None, ()) if activations is None else unpack(activations)
        if self.rank_of_stage[stage] == self._own_rank:
            detached = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            self._handed_over[stage].append(None if header is None else header.pack(tuple(detached)))
            return
        peer = self.rank_of_stage[stage]
        text = ("" if header is None else header.to_json()).encode()
        length = torch.tensor([len(text)], dtype=torch.int64)
        payload = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
        for tensor in (length, payload, *tensors):
            self.start_send(peer, tensor.detach().to(self._network_device))

    def start_send(self, peer: int, tensor: torch.Tensor) -> None:
        """Send a tensor alone to another rank, without waiting."""
        work = dist.isend(tensor.contiguous(), group=self.group, group_dst=peer)
        assert work is not None  # this rank is in the group
        self._sends.add(work)

    def receive(self, stage: int) -> Activations | None:
        """Wait for what was sent to `stage`. Tensors that a gradient flows back through are leaves that want one."""
        if self.rank_of_stage[stage - 1] == self._own_rank:
            return self._handed_over[stage].popleft()
        peer = self.rank_of_stage[stage - 1]
        length = self._receive_tensor(peer, (1,), torch.int64)
        payload = self._receive_tensor(peer, (max(1, int(length)),), torch.uint8)
        if int(length) == 0:
            return None
        header = Header.from_json(payload.cpu().numpy().tobytes().decode())
        tensors = (self._receive_tensor(peer, m.shape, m.dtype).requires_grad_(m.requires_grad) for m in header.metas)
        return header.pack(tuple(tensors))

    def broadcast_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give all ranks what the rank of the last stage has; others give one of its shape and type. A collective."""
        buffer = tensor.to(self._network_device, copy=True)
        dist.broadcast(buffer, group=self.group, group_src=self.rank_of_stage[-1])
        return buffer.to(tensor.device)

    def flush(self) -> None:
        """Wait until everything is sent."""
        self._sends.wait()

    def _receive_tensor(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._network_device)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor.to(self.device)


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
