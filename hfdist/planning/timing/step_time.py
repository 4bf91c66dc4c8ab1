"""Seconds of a step: each phase by the limits of the device, the traffic that no computation hides, and the bubble.

    phase       on a GPU the longer of its arithmetic and memory traffic, and of starting its operations; on a CPU all
    traffic     a ring's or an exchange's bytes, by the slowest link on its way, and the hops of each call; hidden as
                far as its layout runs it beside a phase that lasts as long, but never its first or last message. What
                one phase hides takes turns on the links. On a CPU nothing hides it: cores do both
    pipeline    the schedule's own list of actions, with the seconds of each stage; or, where the costs of one rank
                stand for all, its bubble's formula

Factors (calibration.py) say how far from its limits a device stays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
"""Share of a backward's memory traffic that its two halves have besides: they read again what came to each matrix.

Measured on a CPU, two halves take 1.10 of a whole backward at a width of 320, and 1.01 to 1.02 at 1,024.
"""
_SLOPE = 1e-6
"""By which share a factor is made larger to find how a step depends on it."""
_PIPELINE = "pipeline"
_IN_BLOCKS = tuple(axis for axis in MODEL_AXES if axis != _PIPELINE)
"""Axes whose ranks wait for each other within each block."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A step's time, and what it is made of without factors."""

    time: StepTime
    ideal: dict[str, float]
    """Seconds of `COMPONENTS` in the step, waiting included: what `TimedStep.ideal` keeps."""


def step_time(
    costs: RankCosts | Sequence[RankCosts],
    strategy: Strategy,
    hardware: Hardware,
    train: TrainConfig,
    factors: Factors | None = None,
) -> StepTime:
    """Give the time of a step.

    Args:
        costs: costs of one rank, which stands for all; or of one rank of each stage of a pipeline, in order.
        strategy: strategy of the layout.
        hardware: hardware of all ranks.
        train: precision, and whether blocks are computed again.
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
    """Give the time of a step and its components; see `step_time`."""
    factors = default_factors(hardware) if factors is None else factors
    every = _listed(costs)
    whole = _time(every, strategy, _Clock(hardware, train, strategy, factors))
    # With all factors twice as large a step takes twice as long. So the slopes, times the factors, add up to the step.
    ideal = {}
    for name in COMPONENTS:
        longer = factors.times(name, 1 + _SLOPE)
        more = _time(every, strategy, _Clock(hardware, train, strategy, longer))
        ideal[name] = max(0.0, (more.seconds - whole.seconds) / (getattr(factors, name) * _SLOPE))
    return StepParts(time=whole, ideal=ideal)


def _listed(costs: RankCosts | Sequence[RankCosts]) -> list[RankCosts]:
    return [costs] if isinstance(costs, RankCosts) else list(costs)


class _Clock:
    """Turns costs into seconds."""

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
        works = factors.compute * costs.flops / self._peak
        works += factors.memory * self._left * costs.moved_bytes / hardware.bytes_per_second
        starts = factors.kernels * self._left * costs.kernels * hardware.kernel_seconds
        return works + starts if hardware.is_cpu else max(works, starts)

    def step(self, costs: OpCosts) -> float:
        """Give the seconds of the optimizer's step; if its state is offloaded, by the host's memory."""
        if self._offloads:
            return self.factors.memory * costs.moved_bytes / self.hardware.host_bytes_per_second
        return self.compute(costs)

    def send(self, traffic: AxisTraffic) -> float:
        """Give the seconds of the traffic of an axis in a step, if nothing hides it."""
        link, hop = self.hardware.link(crosses_machines=False)
        network, far_hop = self.hardware.link(crosses_machines=True)
        seconds = traffic.sent_bytes / link
        if traffic.crosses_machines and traffic.kind in (ALL_TO_ALL, SEND):
            # Each peer gets its own part.
            far = (traffic.size - traffic.machine_ranks) / max(1, traffic.size - 1)
            seconds = max(traffic.sent_bytes * (1 - far) / link, traffic.sent_bytes * far / network)
        elif traffic.crosses_machines:
            # Rings leave a machine over the links of all its ranks.
            seconds = traffic.sent_bytes / min(link, network * traffic.machine_ranks)
        near, far = _hops(traffic, on_cpu=self.hardware.is_cpu)
        start = 0.0 if self.hardware.is_cpu else START_SECONDS
        return self.factors.link * (seconds + traffic.calls * (start + near * hop + far * far_hop))


def _hops(traffic: AxisTraffic, *, on_cpu: bool) -> tuple[int, int]:
    """Count the messages of a call that wait for each other, within a machine and between machines.

    A ring passes on n - 1 parts, an all-reduce twice as many, as gloo does. NCCL sends to all peers of an exchange at
    once, and its all-reduce is a chain within each machine and a tree between them, which sends no more bytes.
    """
    num_machines = -(-traffic.size // traffic.machine_ranks) if traffic.crosses_machines else 1
    if traffic.kind == SEND or (traffic.kind == ALL_TO_ALL and not on_cpu):
        return (0, 1) if num_machines > 1 else (1, 0)
    times = 2 if traffic.kind == ALL_REDUCE else 1
    if traffic.kind == ALL_REDUCE and not on_cpu:
        in_machine = traffic.size if num_machines == 1 else traffic.machine_ranks
        return times * (in_machine - 1), times * math.ceil(math.log2(num_machines))
    between = times * (num_machines - 1)
    return times * (traffic.size - 1) - between, between


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Seconds of one rank."""

    stages: list[StageSeconds]
    """Seconds of a micro batch in each stage that the rank runs."""
    optimizer: float
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds by axis, without what is in the blocks of a pipeline, and without messages between its stages."""
    message: float = 0.0
    """Seconds of a message from one stage to the next."""

    def busy(self, num_microbatches: int) -> float:
        return num_microbatches * sum(stage.forward + stage.backward for stage in self.stages)

    @property
    def again(self) -> float:
        """Seconds by which the backwards of a micro batch take longer in two halves."""
        return sum(stage.input_half + stage.weight_half - stage.backward for stage in self.stages)


def _time(every: list[RankCosts], strategy: Strategy, clock: _Clock) -> StepTime:
    num_microbatches = strategy.batch.num_microbatches
    ranks = [_rank_seconds(costs, num_microbatches, clock) for costs in every]
    slowest = max(ranks, key=lambda rank: rank.busy(num_microbatches))
    busy, bubble = slowest.busy(num_microbatches), 0.0
    # All ranks wait for the slowest optimizer step.
    optimizer = max(rank.optimizer for rank in ranks)
    exposed: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for axis, seconds in rank.exposed.items():
            exposed[axis] = max(exposed[axis], seconds)
    if strategy.topology.pipeline > 1:
        bubble, waiting = _pipeline(ranks, strategy, clock, busy)
        exposed[_PIPELINE] += waiting
        # The stages' seconds include these.
        inside = {axis: exposed.get(axis, 0.0) for axis in _IN_BLOCKS}
        busy -= sum(inside.values())
    time = StepTime(compute=busy + optimizer, bubble=bubble, exposed=dict(exposed))
    spread = clock.factors.spread
    return replace(time, low=time.seconds / spread, high=time.seconds * spread)


def _rank_seconds(costs: RankCosts, num_microbatches: int, clock: _Clock) -> _Rank:
    forwards = [clock.compute(stage.forward) for stage in costs.stages]
    backwards = [clock.compute(stage.backward) for stage in costs.stages]
    room = {Phase.forward: sum(forwards), Phase.backward: sum(backwards)}
    exposed, message = _exposed(costs.traffic, room, clock)
    in_blocks = sum(exposed.get(axis, 0.0) for axis in _IN_BLOCKS) / num_microbatches
    if any(one.kind == SEND for one in costs.traffic):
        # Half of the waiting is in the forward and half in the backward of each stage.
        each = in_blocks / len(costs.stages) / 2
        forwards, backwards = [s + each for s in forwards], [s + each for s in backwards]
    again = [_SPLIT_AGAIN * clock.compute(replace(stage.backward, flops=0.0)) for stage in costs.stages]
    return _Rank(
        stages=[
            StageSeconds(forward, backward, *[(backward + more) / 2] * 2)
            for forward, backward, more in zip(forwards, backwards, again, strict=True)
        ],
        optimizer=clock.step(costs.optimizer),
        exposed=exposed,
        message=message,
    )


def _exposed(traffic: Sequence[AxisTraffic], room: dict[Phase, float], clock: _Clock) -> tuple[dict[str, float], float]:
    """Give the seconds of traffic that are not hidden, by axis, and those of one message between stages."""
    exposed: dict[str, float] = defaultdict(float)
    # Seconds in which a phase may still hide traffic, in so many micro batches.
    counts = {one.microbatches for one in traffic}
    left = {(phase, count): seconds * count for phase, seconds in room.items() for count in counts}
    message = 0.0
    for one in traffic:
        seconds = clock.send(one)
        if one.kind == SEND:
            message = seconds / one.calls
            continue
        if one.overlaps is not None and not clock.hardware.is_cpu:
            place = one.overlaps, one.microbatches
            hidden = min(max(0.0, left[place]), seconds * (1 - one.microbatches / max(one.calls, one.microbatches)))
            for other in left:
                if other[0] is one.overlaps:
                    # Links are in use in each of these micro batches, of which the last ones hide other traffic, too.
                    left[other] -= hidden * min(1.0, other[1] / one.microbatches)
            seconds -= hidden
        exposed[one.axis] += seconds
    return exposed, message


def _pipeline(ranks: list[_Rank], strategy: Strategy, clock: _Clock, busy: float) -> tuple[float, float]:
    """Give the seconds in which the slowest rank waits for others, and those more for messages."""
    config, num_ranks = strategy.config, strategy.topology.pipeline
    num_microbatches = strategy.batch.num_microbatches
    per_rank = stages_per_rank(config.schedule, config.stages_per_rank)
    message = max(rank.message for rank in ranks)
    splits = not (clock.train.gradient_checkpointing or clock.train.compile is Compile.blocks)
    if len(ranks) == num_ranks:
        seconds = [rank.stages for rank in ranks]
        on_cpu = clock.hardware.is_cpu
        alone = simulate(config.schedule, seconds, num_microbatches, splits_backward=splits)
        whole = simulate(
            config.schedule, seconds, num_microbatches, message, splits_backward=splits, sender_waits=on_cpu
        )
        return _bubble(busy, alone, clock), max(0.0, whole - alone)
    idle = bubble_fraction(
        config.schedule, num_ranks=num_ranks, stages_per_rank=per_rank, num_microbatches=num_microbatches
    )
    share = split_share(config.schedule, num_ranks, num_microbatches) if splits else 0.0
    again = share * num_microbatches * max(rank.again for rank in ranks)
    # Messages of the first and the last micro batch are waited for; on a CPU, which sends itself, all are.
    waited = 2 * (num_ranks - 1) + (2 * num_microbatches * per_rank if clock.hardware.is_cpu else 0)
    return _bubble(busy, (busy + again) / (1 - idle), clock), waited * message


def _bubble(busy: float, whole: float, clock: _Clock) -> float:
    """Give the seconds of a bubble. Ranks that share cores compute faster while others wait."""
    return max(0.0, whole * clock.hardware.core_share - busy)
