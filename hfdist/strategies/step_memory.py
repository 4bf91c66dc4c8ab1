"""The memory of a rank in a step, in closed form: the sizes that a Strategy gets, and the bytes that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hfdist.config.layout import Layout
from hfdist.config.strategy import Offload


@dataclass(frozen=True, kw_only=True)
class ShardFractions:
    """The shares of a model's state that one rank holds, each from 1 / data ranks to 1."""

    weights: float = 1.0
    """Share of the weights."""
    gradients: float = 1.0
    """Share of the gradients."""
    optimizer: float = 1.0
    """Share of the optimizer's state."""

    def of_adam(self, weight_bytes: float) -> float:
        """Give the bytes that a rank holds for each element: weight, gradient and Adam's two moments, of one type."""
        return weight_bytes * (self.weights + self.gradients + 2 * self.optimizer)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes that a rank holds at one moment, by what they are."""

    weights: float = 0.0
    """Parameters and buffers of the model, as this rank holds them between steps."""
    gradients: float = 0.0
    """Gradients of parameters, as this rank holds them."""
    optimizer: float = 0.0
    """State of the optimizer, and master weights where it has any."""
    activations: float = 0.0
    """Tensors that the forward keeps for the backward, and tensors that both need for a moment."""
    buffers: float = 0.0
    """Buffers of the layout: gathered parameters, buckets, and tensors on their way to other ranks."""
    runtime: float = 0.0
    """Memory of the process without a model: on a GPU the context and libraries, on a CPU the interpreter too."""

    @property
    def total(self) -> float:
        """Bytes of all of these together."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.buffers
        return held + self.runtime


class Buffers(NamedTuple):
    """Bytes of a layout's own buffers, by the time in a step at which they are there."""

    gathered: float = 0.0
    """Bytes of other ranks' weights, in forwards and backwards."""
    reduced: float = 0.0
    """Bytes of gradients on their way to their owners, in backwards."""
    after_blocks: float = 0.0
    """Bytes of buffers that are there once all blocks have run, at the optimizer's step."""


class Copied(NamedTuple):
    """Bytes that a layout reads and writes in a step beside those of autograd and the optimizer."""

    backward: float
    """Bytes in each backward."""
    optimizer: float = 0.0
    """Bytes in the optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """Sizes of the part of a model that one rank has before it is sharded, in elements, and bytes of its step."""

    layout: Layout
    """The layout of the run."""
    fractions: ShardFractions
    """The shares of the state that the rank holds."""
    elements: float
    """Elements of the parameters that the rank computes with."""
    trained: float
    """Elements of these parameters that are not frozen."""
    state_elements: float
    """Elements of the parameters of which the rank holds the shares in `fractions`. They are more than `elements` where
    a layout shares out the experts of all expert ranks."""
    state_trained: float
    """Elements of these parameters that are not frozen."""
    largest_block: float
    """Elements of the rank's part of the largest block."""
    ends: float
    """Elements of the parameters outside of blocks."""
    trained_block: float
    """Elements of the whole model's largest block that are not frozen."""
    trained_end: float
    """Elements of the larger end that are not frozen."""
    weight_bytes: float
    """Bytes of an element of the weights."""
    gradient_bytes: float
    """Bytes of an element of the gradients."""
    optimizer_bytes: float
    """Bytes of the optimizer's state for an element of the weights."""
    half_bytes: float | None
    """Bytes of an element in the type of the arithmetic; None: that is the weights' type."""
    kept: float
    """Bytes of activations that the forwards leave."""
    copies: float
    """Bytes of copies of the blocks' weights in the type of the arithmetic, which autocast leaves."""
    working: float
    """Bytes that the backward of a block needs beside the activations that are kept."""
    of_head: float
    """Bytes that the loss needs beside the activations that are kept."""
    frozen: float = 0.0
    """Bytes of another model's weights that the rank holds."""
    frozen_gathered: float = 0.0
    """Bytes of the other model's weights that are whole for a moment of its forward, where ranks share them."""

    @property
    def stepped(self) -> float:
        """Elements that the rank's optimizer steps."""
        return self.state_trained * self.fractions.optimizer

    def state(self) -> MemoryUse:
        """Give the bytes that the rank holds between steps on the device, and its activations after the forward."""
        shares = self.fractions
        # Offloading moves the optimizer's state to the host, and gradients with it.
        trained_here = self.state_trained if self.layout.offload is Offload.none else 0.0
        return MemoryUse(
            weights=self.state_elements * self.weight_bytes * shares.weights,
            gradients=trained_here * self.gradient_bytes * shares.gradients,
            optimizer=trained_here * self.optimizer_bytes * shares.optimizer,
            activations=self.kept + self.copies,
        )
