"""Memory and time of any layout of a run by formulas, and the least that either can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from hfdist.config.batch import BatchPlan
from hfdist.config.hardware import Hardware
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Sharding
from hfdist.errors import ConfigError
from hfdist.pipeline.partition import partition
from hfdist.pipeline.schedule import rank_of_stage
from hfdist.planning.costs import AxisTraffic, PeakMemory, RankCosts, StepTime
from hfdist.planning.searching.constants import ModelConstants
from hfdist.planning.searching.formulas import Load, even_loads, loads_of, parts_of, peak, rank_costs, rank_sizes
from hfdist.planning.timing.calibration import Factors
from hfdist.planning.timing.step_time import step_time
from hfdist.planning.timing.traffic import traffic
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import select_strategy
from hfdist.strategies.step_memory import RankSizes, ShardFractions
from hfdist.topology import MODEL_AXES

_MOST_PLAYED = 1024
"""The most forwards of stages for which a pipeline's schedule is played: torch takes a second to write it out."""
_LOW, _HIGH = 0.85, 1.15
"""Range of the measured peak, as shares of one by formula; a trace is nearer."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout, with what it needs."""

    layout: Layout
    config: RunConfig
    """Config of the run in this layout."""
    overrides: tuple[str, ...]
    """What must be added to the command of the run that was asked for."""
    memory: PeakMemory
    time: StepTime
    mfu: float | None
    """None: nothing is known of the hardware's peak."""
    traffic: tuple[AxisTraffic, ...]
    tokens_per_step: int
    """Tokens that the model reads in a step."""
    is_traced: bool = False
    """Whether a trace has confirmed the memory; otherwise it is that of formulas."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What layouts are planned for."""

    hardware: Hardware
    usable_bytes: float
    """Usable bytes of one device, or of a process's share of the host."""
    runtime_bytes: float = 0.0
    """Bytes that a process holds without a model."""
    factors: Factors | None = None
    """Factors by which steps take longer than the limits of the hardware; None: those without calibration."""

    @property
    def per_machine(self) -> int:
        """Ranks that share a machine."""
        return self.hardware.devices_per_machine


class Evaluator:
    """Memory and time of layouts of one run, by formulas.

    Args:
        config: the run's config.
        model: the model's constants, as `measure` gives them.
        machines: where the run is to be.
        stages: the blocks of stages that are chosen already, by the ranks of the stages; others are made even.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelConstants,
        machines: Machines,
        stages: Mapping[tuple[int, ...], tuple[range, ...]] | None = None,
    ) -> None:
        self.config, self.model, self.machines = config, model, machines
        self._stages = dict(stages or {})

    @property
    def _tokens_per_step(self) -> int:
        of_sequence = self.model.sizes[1].sequence_tokens or self.model.sequence_length
        return of_sequence * self.config.train.global_batch_size

    @property
    def available_bytes(self) -> float:
        """Bytes that a process may use for the model."""
        return self.machines.usable_bytes - self.machines.runtime_bytes

    def strategy(self, layout: Layout, config: RunConfig | None = None) -> Strategy:
        """Select the strategy of a layout; ConfigError: the run refuses it."""
        config = config or layout.apply(self.config)
        batch = BatchPlan(
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=layout.micro_batch_size,
            num_microbatches=layout.num_microbatches,
            data_size=layout.data,
            sequence_length=self.model.sequence_length,
        )
        device_type, topology = self.machines.hardware.device_type, config.strategy.topology(layout.world_size)
        return select_strategy(config.strategy, config.train, topology=topology, batch=batch, device_type=device_type)

    def least_bytes(self, layout: Layout) -> float:
        """Give the least bytes that a rank holds, however state is sharded."""
        ways: dict[type[Strategy], Layout] = {Strategy: layout}
        if not layout.splits_model:
            # Imported here: it takes time, which layouts with a split model do not need.
            from hfdist.strategies.deepspeed.zero import ZeroStrategy

            # DeepSpeed holds its weights in half precision, and the second stage has the smallest buffers.
            ways[ZeroStrategy] = replace(layout, sharding=Sharding.zero2)
        loads, least = even_loads(self.model, layout), _least_fractions(layout)
        sizes = {way: rank_sizes(self.model, sharded, way, least, loads) for way, sharded in ways.items()}
        return min(peak(way, of_way)[1].total for way, of_way in sizes.items())

    def least_seconds(self, layout: Layout, *, with_model_axes: bool = False) -> float:
        """Give the least seconds of a step, by its arithmetic alone, shared out evenly.

        `with_model_axes`: with what the ranks of a replica send each other.
        """
        strategy, loads = self.strategy(layout), even_loads(self.model, layout)
        costs = rank_costs(
            self.model, strategy, rank_sizes(self.model, layout, strategy, _least_fractions(layout), loads), loads
        )
        if with_model_axes:
            sent = self._traffic(layout, strategy, {})
            costs = replace(costs, traffic=tuple(one for one in sent if one.axis in MODEL_AXES))
        return self.time(costs, strategy).seconds

    def evaluate(self, layout: Layout, *, most_seconds: float = inf) -> Candidate | None:
        """Give memory and time of a layout.

        None: it does not fit, the run refuses it, or a step takes `most_seconds` or longer.
        """
        model = self.model
        if (layout.tensor, layout.expert) not in model.shares or (layout.context > 1 and not model.shares_tokens):
            return None
        if layout.sequence and layout.tensor not in model.sequence_degrees:
            return None
        if layout.pipeline > 1 and not model.has_pipelines:
            return None
        config = layout.apply(self.config)
        try:
            strategy = self.strategy(layout, config)
            loads = self._loads(layout)
        except ConfigError:
            return None
        sizes = {
            rank: rank_sizes(self.model, layout, strategy, strategy.fractions, own, rank) for rank, own in loads.items()
        }
        memory = self._memory(strategy, sizes)
        if memory.use.total > self.machines.usable_bytes:
            return None
        sent = self._traffic(layout, strategy, loads)
        costs = [replace(rank_costs(model, strategy, sizes[rank], own), traffic=sent) for rank, own in loads.items()]
        is_played = layout.pipeline * layout.stages_per_rank * layout.num_microbatches <= _MOST_PLAYED
        # Where the schedule is too long to be played, the rank with most to compute stands for all.
        time = self.time(costs if is_played else max(costs, key=_flops), strategy)
        if time.seconds >= most_seconds:
            return None
        return Candidate(
            layout=layout,
            config=config,
            overrides=layout.overrides(self.config),
            memory=memory,
            time=time,
            mfu=self.mfu(layout, time),
            traffic=sent,
            tokens_per_step=self._tokens_per_step,
        )

    def _loads(self, layout: Layout) -> dict[int, list[Load]]:
        """Give the stages of each pipeline rank; PartitionError: there are fewer blocks than stages."""
        if layout.pipeline == 1:
            return {0: even_loads(self.model, layout)}
        ranks = rank_of_stage(layout.schedule, layout.pipeline, layout.stages_per_rank)
        if ranks not in self._stages:
            # Kept: to share blocks out evenly over ranks of several stages takes a while.
            self._stages[ranks] = partition(self.model.balance, ranks)
        return {rank: loads_of(self.model, self._stages[ranks], ranks, rank) for rank in range(layout.pipeline)}

    def _memory(self, strategy: Strategy, sizes: Mapping[int, RankSizes]) -> PeakMemory:
        peaks = {rank: peak(strategy, of_rank) for rank, of_rank in sizes.items()}
        worst = max(peaks, key=lambda rank: peaks[rank][1].total)
        phase, use = peaks[worst]
        use = replace(use, runtime=self.machines.runtime_bytes)
        first = strategy.topology.pipelines[0][worst]
        return PeakMemory(rank=first, phase=phase, use=use, low_bytes=use.total * _LOW, high_bytes=use.total * _HIGH)

    def _traffic(
        self, layout: Layout, strategy: Strategy, loads: Mapping[int, Sequence[Load]]
    ) -> tuple[AxisTraffic, ...]:
        sizes = replace(self.model.sizes[layout.tensor], recomputes=layout.recompute is not None)
        if len(loads) > 1:
            worst = max(self._elements(of_rank) for of_rank in loads.values())
            sizes = replace(sizes, worst_stage_share=worst / self.model.parameters)
        return traffic(strategy, sizes, devices_per_machine=self.machines.per_machine)

    def _elements(self, loads: Sequence[Load]) -> float:
        """Count a rank's parameters, in the unit of `ModelConstants.parameters`."""
        parts = [part for load in loads for part in parts_of(self.model, self.model.shares[1, 1], load)]
        return sum(part.parameters * number for part, _, number in parts)

    def time(self, costs: RankCosts | Sequence[RankCosts], strategy: Strategy) -> StepTime:
        """Give the time of a step of `costs`, with its traffic: of one rank that stands for all, or of each rank."""
        machines = self.machines
        return step_time(costs, strategy, machines.hardware, self.config.train, machines.factors)

    def mfu(self, layout: Layout, time: StepTime) -> float | None:
        """Give the share of the hardware's peak; None: that is not known."""
        flops = self.model.flops_per_sequence * self.config.train.global_batch_size
        return self.machines.hardware.mfu(flops / (time.seconds * layout.world_size))


def _flops(costs: RankCosts) -> float:
    return sum(stage.forward.flops + stage.backward.flops for stage in costs.stages)


def _least_fractions(layout: Layout) -> ShardFractions:
    """Give the least shares of the state that any sharding leaves on a rank.

    A pipeline gathers weights, and keeps gradients, for a whole step.
    """
    share = 1.0 / (layout.data * layout.context)
    if layout.pipeline > 1:
        return ShardFractions(optimizer=share)
    return ShardFractions(weights=share, gradients=share, optimizer=share)
