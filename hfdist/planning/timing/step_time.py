"""Computes the seconds of a step: its phases, the traffic that no computation hides, and the bubble of a pipeline.

    phase       on a GPU the longer of two: its arithmetic and memory traffic, or the start of its operations; on a CPU
                their sum
    traffic     a ring's or an exchange's bytes, by the slowest link on its way, and the hops of each call; hidden as
                far as its layout runs it beside a phase that lasts as long, but never its first or last message. What
                one phase hides takes turns on the links. On a CPU nothing hides it: cores do both
    pipeline    the schedule's own list of actions, with the seconds of each stage; or, where the costs of one rank
                stand for all, its bubble's formula

Factors, fitted to timed steps, say by how much a device stays below its limits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hfdist.config.hardware import START_SECONDS, Hardware
from hfdist.config.strategy import Offload
from hfdist.config.train import Compile, Precision, TrainConfig
from hfdist.models.blocks import compiles_on_gpus
from hfdist.pipeline.schedule import bubble_fraction, split_share, stages_per_rank
from hfdist.pipeline.simulate import StageSeconds, simulate
from hfdist.planning.costs import AxisTraffic, OpCosts, RankCosts, StepTime
from hfdist.planning.timing.calibration import COMPONENTS, Factors, default_factors
from hfdist.sent_bytes import ALL_REDUCE, ALL_TO_ALL, SEND
from hfdist.strategies.base import Strategy
from hfdist.strategies.traffic import Phase
from hfdist.topology import MODEL_AXES

_LEFT_OF_FUSED = 0.67
"""Share of memory traffic and of operations that is left where blocks are compiled: by published runs."""
_SPLIT_AGAIN = 0.5
"""Additional memory traffic of a backward in two halves, as a share of its own: both read the inputs of each matrix.

Measured on a CPU, two halves take 1.10 of a whole backward at a width of 320, and 1.01 to 1.02 at 1,024.
"""
_SLOPE = 1e-6
"""The share by which a factor is made larger, to find how the seconds of a step depend on it."""
_PIPELINE = "pipeline"
_IN_BLOCKS = tuple(axis for axis in MODEL_AXES if axis != _PIPELINE)
"""Axes whose ranks wait for each other within each block."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The time of a step, and its seconds by component, without factors."""

    time: StepTime
    ideal: dict[str, float]
    """Seconds of the step by component (`COMPONENTS`) before its factor is applied, waiting included."""


def step_time(
    costs: RankCosts | Sequence[RankCosts],
    strategy: Strategy,
    hardware: Hardware,
    train: TrainConfig,
    factors: Factors | None = None,
) -> StepTime:
    """Give the time of a step.

    Args:
        costs: the costs of one rank, which stands for all; or of each rank of a pipeline, in order.
        strategy: the strategy of the layout.
        hardware: the hardware of all ranks.
        train: the run's `train` config: precision, compilation, activation checkpointing.
        factors: factors of a calibration; None: the defaults.
    """
    factors = default_factors(hardware) if factors is None else factors
    return _time(_listed(costs), strategy, _Clock(hardware, train, strategy, factors))


def step_parts(
    costs: RankCosts | Sequence[RankCosts],
    strategy: Strategy,
    hardware: Hardware,
    train: TrainConfig,
    factors: Factors | None = None,
) -> StepParts:
    """Give the time of a step and its seconds by component; the arguments are those of `step_time`."""
    factors = default_factors(hardware) if factors is None else factors
    ranks = _listed(costs)
    whole = _time(ranks, strategy, _Clock(hardware, train, strategy, factors))
    # With all factors twice as large a step takes twice as long. So the slopes, times the factors, add up to the step:
    # a slope is what the component takes before its factor, and only where it is not hidden.
    ideal = {}
    for name in COMPONENTS:
        longer = factors.times(name, 1 + _SLOPE)
        more = _time(ranks, strategy, _Clock(hardware, train, strategy, longer))
        ideal[name] = max(0.0, (more.seconds - whole.seconds) / (getattr(factors, name) * _SLOPE))
    return StepParts(time=whole, ideal=ideal)


def _listed(costs: RankCosts | Sequence[RankCosts]) -> list[RankCosts]:
    return [costs] if isinstance(costs, RankCosts) else list(costs)


class _Clock:
    """Turns operations and traffic of a rank into seconds, on one hardware."""

    def __init__(self, hardware: Hardware, train: TrainConfig, strategy: Strategy, factors: Factors) -> None:
        self.hardware, self.train, self.factors = hardware, train, factors
        is_compiled = train.compile is Compile.model or compiles_on_gpus(train, strategy.config)
        self._left = _LEFT_OF_FUSED if is_compiled and not hardware.is_cpu else 1.0
        self._offloads = strategy.config.offload is Offload.cpu and not hardware.is_cpu
        uses_tf32 = train.precision is Precision.fp32 and bool(train.arguments.get("tf32"))
        self._peak = hardware.peak_flops(train.precision, uses_tf32=uses_tf32)

    def compute(self, costs: OpCosts) -> float:
        """Give the seconds of some operations."""
        factors, hardware = self.factors, self.hardware
        seconds = factors.compute * costs.flops / self._peak
        seconds += factors.memory * self._left * costs.moved_bytes / hardware.bytes_per_second
        starts = factors.kernels * self._left * costs.kernels * hardware.kernel_seconds
        # A GPU works while the host starts the next operations; a CPU does both itself.
        return seconds + starts if hardware.is_cpu else max(seconds, starts)

    def step(self, costs: OpCosts) -> float:
        """Give the seconds of the optimizer's step; if its state is offloaded, by the host's memory."""
        if self._offloads:
            return self.factors.memory * costs.moved_bytes / self.hardware.host_bytes_per_second
        return self.compute(costs)

    def send(self, traffic: AxisTraffic) -> float:
        """Give the seconds of the traffic of an axis in a step, if nothing hides it."""
        link, link_latency = self.hardware.link(crosses_machines=False)
        network, network_latency = self.hardware.link(crosses_machines=True)
        if not traffic.crosses_machines:
            seconds = traffic.sent_bytes / link
        elif traffic.kind in (ALL_TO_ALL, SEND):
            # Each peer gets its own part: this share of the bytes goes to other machines, the rest stays within.
            outside = (traffic.size - traffic.machine_ranks) / max(1, traffic.size - 1)
            seconds = max(traffic.sent_bytes * (1 - outside) / link, traffic.sent_bytes * outside / network)
        else:
            # Rings leave a machine over the links of all its ranks.
            seconds = traffic.sent_bytes / min(link, network * traffic.machine_ranks)
        hops = _hops(traffic, on_cpu=self.hardware.is_cpu)
        start = 0.0 if self.hardware.is_cpu else START_SECONDS
        latency = start + hops.in_machine * link_latency + hops.between_machines * network_latency
        return self.factors.link * (seconds + traffic.calls * latency)


class _Hops(NamedTuple):
    """Messages of one call that are sent one after the other."""

    in_machine: int
    between_machines: int


def _hops(traffic: AxisTraffic, *, on_cpu: bool) -> _Hops:
    """Count the messages of a call that wait for each other.

    A ring passes on n - 1 parts, an all-reduce twice as many, as gloo does. NCCL sends to all peers of an exchange at
    once, and its all-reduce is a chain within each machine and a tree between them, which sends no more bytes.
    """
    num_machines = math.ceil(traffic.size / traffic.machine_ranks) if traffic.crosses_machines else 1
    if traffic.kind == SEND or (traffic.kind == ALL_TO_ALL and not on_cpu):
        return _Hops(0, 1) if num_machines > 1 else _Hops(1, 0)
    if traffic.kind == ALL_REDUCE and not on_cpu:
        chain = traffic.size if num_machines == 1 else traffic.machine_ranks
        # Up to the root of the tree, and down again.
        return _Hops(2 * (chain - 1), 2 * math.ceil(math.log2(num_machines)))
    rounds = 2 if traffic.kind == ALL_REDUCE else 1
    between = rounds * (num_machines - 1)
    return _Hops(rounds * (traffic.size - 1) - between, between)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Seconds of one rank in a step, by what it does."""

    stages: list[StageSeconds]
    """Seconds of a micro batch in each stage that the rank runs."""
    optimizer: float
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds of traffic that nothing hides, by axis; without messages between the stages of a pipeline."""
    message: float = 0.0
    """Seconds of a message from one stage to the next."""

    def busy(self, num_microbatches: int) -> float:
        """Give the seconds in which the rank computes so many micro batches."""
        return num_microbatches * sum(stage.forward + stage.backward for stage in self.stages)

    @property
    def split_seconds(self) -> float:
        """Seconds by which the backwards of a micro batch take longer in two halves."""
        return sum(stage.input_half + stage.weight_half - stage.backward for stage in self.stages)


def _time(costs_of_ranks: list[RankCosts], strategy: Strategy, clock: _Clock) -> StepTime:
    """Put a step together: the slowest rank's computation, the longest waits, and a pipeline's bubble."""
    num_microbatches = strategy.batch.num_microbatches
    ranks = [_rank_seconds(costs, num_microbatches, clock) for costs in costs_of_ranks]
    slowest = max(ranks, key=lambda rank: rank.busy(num_microbatches))
    busy, bubble = slowest.busy(num_microbatches), 0.0
    # All ranks wait for the slowest optimizer step.
    optimizer = max(rank.optimizer for rank in ranks)
    exposed: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for axis, seconds in rank.exposed.items():
            exposed[axis] = max(exposed[axis], seconds)
    if strategy.topology.pipeline > 1:
        waits = _pipeline_waits(ranks, strategy, clock, busy)
        bubble = waits.bubble
        exposed[_PIPELINE] += waits.messages
        # The seconds of stages include those of the traffic in their blocks, which are counted by axis.
        busy -= sum(exposed.get(axis, 0.0) for axis in _IN_BLOCKS)
    time = StepTime(compute=busy + optimizer, bubble=bubble, exposed=dict(exposed))
    spread = clock.factors.spread
    return replace(time, low=time.seconds / spread, high=time.seconds * spread)


def _rank_seconds(costs: RankCosts, num_microbatches: int, clock: _Clock) -> _Rank:
    """Give the seconds of a rank; in a pipeline its stages take longer by the traffic in their blocks."""
    forwards = [clock.compute(stage.forward) for stage in costs.stages]
    backwards = [clock.compute(stage.backward) for stage in costs.stages]
    phase_seconds = {Phase.forward: sum(forwards), Phase.backward: sum(backwards)}
    messages = [sent for sent in costs.traffic if sent.kind == SEND]
    message = max((clock.send(sent) / sent.calls for sent in messages), default=0.0)
    others = [sent for sent in costs.traffic if sent.kind != SEND]
    exposed = _exposed(others, phase_seconds, clock)
    in_blocks = sum(exposed.get(axis, 0.0) for axis in _IN_BLOCKS) / num_microbatches
    if messages:
        # Half of the waiting is in the forward and half in the backward of each stage.
        each = in_blocks / len(costs.stages) / 2
        forwards, backwards = [s + each for s in forwards], [s + each for s in backwards]
    split = [_SPLIT_AGAIN * clock.compute(replace(stage.backward, flops=0.0)) for stage in costs.stages]
    return _Rank(
        stages=[
            # The two halves of a backward, of its inputs and of its weights, take equally long.
            StageSeconds(forward, backward, input_half=(backward + more) / 2, weight_half=(backward + more) / 2)
            for forward, backward, more in zip(forwards, backwards, split, strict=True)
        ],
        optimizer=clock.step(costs.optimizer),
        exposed=exposed,
        message=message,
    )


def _exposed(traffic: Sequence[AxisTraffic], phase_seconds: dict[Phase, float], clock: _Clock) -> dict[str, float]:
    """Give the seconds of traffic that nothing hides, by axis.

    Args:
        traffic: traffic of a step, without messages between stages.
        phase_seconds: seconds of the computation of one micro batch, by phase.
        clock: the clock of the hardware.
    """
    exposed: dict[str, float] = defaultdict(float)
    # Traffic of some micro batches only is hidden by these alone. So what may still hide traffic is counted by the
    # phase, and by the number of micro batches that send.
    counts = {sent.microbatches for sent in traffic}
    left = {(phase, count): seconds * count for phase, seconds in phase_seconds.items() for count in counts}
    for sent in traffic:
        seconds = clock.send(sent)
        if sent.overlaps is not None and not clock.hardware.is_cpu:
            # One message of each micro batch, its first or its last, has no computation beside it.
            num_messages = max(sent.calls, sent.microbatches)
            can_hide = seconds * (1 - sent.microbatches / num_messages)
            hidden = min(max(0.0, left[sent.overlaps, sent.microbatches]), can_hide)
            for phase, count in left:
                if phase is sent.overlaps:
                    # Links are in use in each of these micro batches, of which the last ones hide other traffic, too.
                    left[phase, count] -= hidden * min(1.0, count / sent.microbatches)
            seconds -= hidden
        exposed[sent.axis] += seconds
    return exposed


class _PipelineWaits(NamedTuple):
    """Seconds of a step in which the slowest rank of a pipeline waits."""

    bubble: float
    """Seconds for the computation of other ranks."""
    messages: float
    """Seconds besides, for messages between stages."""


def _pipeline_waits(ranks: list[_Rank], strategy: Strategy, clock: _Clock, busy: float) -> _PipelineWaits:
    """Find how long the slowest rank waits: by the schedule's actions if each rank is known, else by a formula.

    `busy`: seconds in which the slowest rank computes.
    """
    config, num_ranks = strategy.config, strategy.topology.pipeline
    num_microbatches = strategy.batch.num_microbatches
    message = max(rank.message for rank in ranks)
    splits = not (clock.train.gradient_checkpointing or clock.train.compile is Compile.blocks)
    if len(ranks) == num_ranks:
        seconds = [rank.stages for rank in ranks]
        on_cpu = clock.hardware.is_cpu
        alone = simulate(config.schedule, seconds, num_microbatches, splits_backward=splits)
        whole = simulate(
            config.schedule, seconds, num_microbatches, message, splits_backward=splits, sender_waits=on_cpu
        )
        return _PipelineWaits(_bubble(busy, alone, clock), max(0.0, whole - alone))
    per_rank = stages_per_rank(config.schedule, config.stages_per_rank)
    idle_share = bubble_fraction(
        config.schedule, num_ranks=num_ranks, stages_per_rank=per_rank, num_microbatches=num_microbatches
    )
    share = split_share(config.schedule, num_ranks, num_microbatches) if splits else 0.0
    split = share * num_microbatches * max(rank.split_seconds for rank in ranks)
    # Messages of the first and the last micro batch are waited for; on a CPU, which sends itself, all are.
    waited = 2 * (num_ranks - 1) + (2 * num_microbatches * per_rank if clock.hardware.is_cpu else 0)
    return _PipelineWaits(_bubble(busy, (busy + split) / (1 - idle_share), clock), waited * message)


def _bubble(busy: float, whole: float, clock: _Clock) -> float:
    """Give the seconds of a bubble, from those of the slowest rank and of the whole pipeline.

    Ranks that share cores compute faster while others wait: `core_share` says by how much.
    """
    return max(0.0, whole * clock.hardware.core_share - busy)
