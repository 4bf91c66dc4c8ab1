"""Costs of a step of one rank: its memory, its operations, its traffic and its time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hfdist.strategies.step_memory import MemoryUse
from hfdist.strategies.traffic import Phase


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The peak memory of a rank in a step."""

    rank: int
    """The rank with the highest peak, among those that were looked at."""
    phase: Phase
    """Phase of the step in which the peak is."""
    use: MemoryUse
    low_bytes: float
    high_bytes: float
    """Range in which the measured peak will lie."""

    def with_runtime(self, runtime_bytes: float) -> PeakMemory:
        """Replace the memory that a process holds without a model."""
        added = runtime_bytes - self.use.runtime
        return replace(
            self,
            use=replace(self.use, runtime=runtime_bytes),
            low_bytes=self.low_bytes + added,
            high_bytes=self.high_bytes + added,
        )


@dataclass(frozen=True, kw_only=True)
class OpCosts:
    """Costs of some operations, on any device."""

    flops: float = 0.0
    """FLOPs of matrix products and attention in the type that `train.precision` computes in; a multiply-add is two."""
    moved_bytes: float = 0.0
    """Bytes that all other operations read and write."""
    kernels: int = 0
    """Calls of operations."""

    def __add__(self, other: OpCosts) -> OpCosts:
        return OpCosts(
            flops=self.flops + other.flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            kernels=self.kernels + other.kernels,
        )

    def __mul__(self, factor: float) -> OpCosts:
        return OpCosts(
            flops=self.flops * factor, moved_bytes=self.moved_bytes * factor, kernels=round(self.kernels * factor)
        )


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Forward and backward of one micro batch in one stage of a pipeline; without one, in the whole model."""

    forward: OpCosts
    backward: OpCosts
    """Costs of the backward, with what activation checkpointing computes again."""

    def with_passes(self, passes: int) -> StageCosts:
        """Give the costs of a step that reads each micro batch so often; only the last time a backward follows."""
        return replace(self, forward=self.forward * passes)


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """Traffic of one rank along one axis of the mesh in a step."""

    axis: str
    """The axis's name in `Topology`; `data` where ranks of all replicas take part."""
    sent_bytes: float
    """Bytes sent by one rank, as in a ring or a pairwise exchange: (n - 1) / n of the whole for a reduce-scatter."""
    calls: int
    """Number of collectives, or of messages."""
    size: int
    """Ranks of the axis."""
    crosses_machines: bool
    """Whether its ranks are on several machines."""
    machine_ranks: int = 1
    """Ranks of the axis on one machine: all of them send to other machines at once, each over its own link."""
    kind: str = ""
    """Kind of the collective, as in `sent_bytes`."""
    microbatches: int = 1
    """Micro batches with this traffic; the computation of the others hides none of it."""
    overlaps: Phase | None = None
    """The phase beside which it can run; None: all wait for it."""


def bytes_by_axis(traffic: Iterable[AxisTraffic]) -> dict[str, float]:
    """Give the bytes that a rank sends in a step, by axis: an axis may have traffic of several kinds."""
    found: dict[str, float] = {}
    for one in traffic:
        found[one.axis] = found.get(one.axis, 0.0) + one.sent_bytes
    return found


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """All costs of a step of one rank."""

    stages: tuple[StageCosts, ...]
    """The stages that this rank runs, in their order; one without a pipeline."""
    optimizer: OpCosts
    traffic: tuple[AxisTraffic, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, of the rank that takes longest."""

    compute: float
    """Forward, backward and the optimizer's step."""
    bubble: float = 0.0
    """Seconds in which a pipeline's rank waits for others."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds of communication that no computation hides, by axis."""
    low: float = 0.0
    high: float = 0.0
    """The range of `seconds`."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.bubble + sum(self.exposed.values())
