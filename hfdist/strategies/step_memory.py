"""What a rank holds in a step, in closed form from a few sizes: what each Strategy is told, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hfdist.config.layout import Layout
from hfdist.config.strategy import Offload


@dataclass(frozen=True, kw_only=True)
class ShardFractions:
    """Which part of the state of `engine.model` this rank holds, from 1 / data_size to 1."""

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0

    def of_adam(self, weight_bytes: float) -> float:
        """Give the bytes of a parameter that this rank holds of it, its gradient and two moments, all of one type."""
        return weight_bytes * (self.weights + self.gradients + 2 * self.optimizer)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes that a rank holds at one moment, by what they are."""

    weights: float = 0.0
    """Parameters and buffers of the model, as this rank holds them between steps."""
    gradients: float = 0.0
    optimizer: float = 0.0
    """State of the optimizer, and master weights where it has any."""
    activations: float = 0.0
    """What the forward keeps for the backward, and what both need for a moment."""
    buffers: float = 0.0
    """Buffers of the layout: gathered parameters, buckets, what travels."""
    runtime: float = 0.0
    """What the process holds without a model: on a GPU the context and libraries, on a CPU the interpreter too."""

    @property
    def total(self) -> float:
        """All of them."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.buffers
        return held + self.runtime


class Buffers(NamedTuple):
    """Bytes of a layout's own buffers, by the time in a step at which they are there."""

    gathered: float = 0.0
    """Weights of other ranks, in forwards and backwards."""
    reduced: float = 0.0
    """Gradients on their way to their owners, in backwards."""
    after_blocks: float = 0.0
    """What is there once all blocks have run, at the optimizer's step."""


class Copied(NamedTuple):
    """Bytes that a layout reads and writes in a step, more than autograd and the optimizer do."""

    backward: float
    """In each backward."""
    optimizer: float = 0.0
    """In the optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """Numbers of the part of a model that one rank has before it is sharded, in elements, and bytes of its step."""

    layout: Layout
    fractions: ShardFractions
    elements: float
    """Elements of the parameters that a rank computes with."""
    trained: float
    """Elements of these that are not frozen."""
    state_elements: float
    """Elements of the parameters that `fractions` are parts of: see `Strategy.counts_all_experts`."""
    state_trained: float
    largest_block: float
    ends: float
    """Elements outside of blocks."""
    trained_block: float
    """Elements of the whole model's largest block that are not frozen."""
    trained_end: float
    """Elements of the larger end that are not frozen."""
    weight_bytes: float
    """Bytes of an element."""
    gradient_bytes: float
    optimizer_bytes: float
    half_bytes: float | None
    """Bytes of an element in the type of the arithmetic, where that is not the weights' type."""
    kept: float
    """Bytes of activations that the forwards leave."""
    copies: float
    """Bytes of copies of the blocks' weights in the type of the arithmetic, which autocast leaves."""
    working: float
    """Bytes that the backward of a block needs besides."""
    of_head: float
    """Bytes that the loss needs besides."""
    frozen: float = 0.0
    """Bytes that a rank holds of another model's weights."""
    frozen_gathered: float = 0.0
    """Bytes of these that are whole for a moment of the forward, where ranks share them."""

    @property
    def stepped(self) -> float:
        """Elements that the rank's optimizer steps."""
        return self.state_trained * self.fractions.optimizer

    def state(self) -> MemoryUse:
        """Give what the rank holds between steps on the device, and its activations after the forward."""
        shares, is_here = self.fractions, self.layout.offload is Offload.none
        return MemoryUse(
            weights=self.state_elements * self.weight_bytes * shares.weights,
            gradients=self.state_trained * self.gradient_bytes * shares.gradients * is_here,
            optimizer=self.state_trained * self.optimizer_bytes * shares.optimizer * is_here,
            activations=self.kept + self.copies,
        )
