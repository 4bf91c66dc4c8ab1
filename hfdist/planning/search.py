"""The best layouts of a run on so many processes, of all that its own checks allow, and the fewest processes that fit.

The search goes from what a rank computes to how state is sharded. Two bounds cut it short. Of memory: micro batches only
need more as they grow, so that behind the first that does not fit no larger one is looked at, and nothing at all of
degrees whose least layout does not fit. Of time: layouts are looked at in the order of the seconds that they take at the
least, until that is more than the worst of the best ones takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop
from math import inf

from hfdist.config.batch import BatchPlan
from hfdist.config.hardware import Hardware
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Sharding
from hfdist.errors import ConfigError
from hfdist.pipeline.partition import partition
from hfdist.pipeline.schedule import rank_of_stage
from hfdist.planning.constants import MODES, ModelConstants
from hfdist.planning.costs import AxisTraffic, PeakMemory, RankCosts, StepTime
from hfdist.planning.formulas import Load, even_loads, live_stages, loads_of, peak_bytes, peak_use, rank_costs
from hfdist.planning.layout_space import Space, divisors
from hfdist.planning.layouts import Layout
from typing import Any
Calibration = Any
from hfdist.planning.traffic import traffic
from hfdist.strategies.base import ShardFractions, Strategy
from hfdist.strategies.select import select_strategy

_LOW, _HIGH = 0.85, 1.15
"""Range of a peak by formula, as shares of it; a trace is nearer."""
_MODEL_AXES = frozenset({"tensor", "context", "expert", "pipeline"})


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout, with what it needs."""

    layout: Layout
    config: RunConfig
    """Of the run in this layout."""
    overrides: tuple[str, ...]
    """What must be added to the command of the run that was asked for."""
    memory: PeakMemory
    time: StepTime
    mfu: float | None
    """None: nothing is known of the hardware's peak."""
    traffic: tuple[AxisTraffic, ...]
    is_traced: bool = False
    """Whether a trace has confirmed the memory; otherwise it is that of formulas."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best layouts that fit, the fastest first, and how much was looked at."""

    candidates: tuple[Candidate, ...]
    num_bounded: int
    """Ways to compute a step whose bounds were found."""
    num_pruned: int
    """Of these and of the degrees above them: whatever does not fit in any sharding."""
    num_evaluated: int
    """Layouts whose time was computed."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What layouts are planned for."""

    hardware: Hardware
    usable_bytes: float
    """Of one device, or of a process's share of the host."""
    runtime_bytes: float = 0.0
    """What a process holds without a model."""
    calibration: Calibration | None = None
    """None: nothing was measured."""

    @property
    def per_machine(self) -> int:
        """Ranks that share a machine."""
        return self.hardware.devices_per_machine


class Evaluator:
    """Memory and time of layouts of one run, by formulas."""

    def __init__(self, config: RunConfig, model: ModelConstants, machines: Machines) -> None:
        self.config, self.model, self.machines = config, model, machines
        self._stages: dict[tuple[int, ...], tuple[range, ...]] = {}

    @property
    def available_bytes(self) -> float:
        """Beside what a process holds without a model."""
        return self.machines.usable_bytes - self.machines.runtime_bytes

    def strategy(self, layout: Layout, config: RunConfig | None = None) -> Strategy:
        """Give the run's own; ConfigError: it refuses the layout."""
        config = config or layout.apply(self.config)
        batch = BatchPlan(
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=layout.micro_batch_size,
            num_microbatches=layout.num_microbatches,
            data_size=layout.data,
            sequence_length=self.model.sequence_length,
        )
        return select_strategy(config.strategy, config.train, topology=layout.topology, batch=batch)

    def least_bytes(self, layout: Layout) -> float:
        """Give what a rank holds at the least, however state is sharded."""
        return peak_bytes(self.model, layout, _least(layout), even_loads(self.model, layout), live_stages(layout, 0))

    def least_seconds(self, layout: Layout) -> float:
        """Give what a step takes at the least: its arithmetic, shared out evenly."""
        return self._seconds(layout, rank_costs(self.model, layout, _least(layout), even_loads(self.model, layout)))

    def least_seconds_with_model_axes(self, layout: Layout) -> float:
        """The same with what the ranks of a replica send each other."""
        sent = [one for one in self._traffic(layout, self.strategy(layout), []) if one.axis in _MODEL_AXES]
        costs = rank_costs(self.model, layout, _least(layout), even_loads(self.model, layout))
        return self._seconds(layout, replace(costs, traffic=tuple(sent)))

    def evaluate(self, layout: Layout, *, most_seconds: float = inf) -> Candidate | None:
        """Give memory and time of a layout; None: it does not fit, the run refuses it, or it takes as long as that."""
        config = layout.apply(self.config)
        try:
            strategy = self.strategy(layout, config)
            loads = self._loads(layout)
        except ConfigError:
            return None
        memory = self._memory(layout, strategy.fractions, loads)
        if memory.use.total > self.machines.usable_bytes:
            return None
        sent = self._traffic(layout, strategy, loads)
        # The rank with most to compute sets the pace.
        costs = max(
            (rank_costs(self.model, layout, strategy.fractions, of_rank) for of_rank in loads), key=_flops
        )
        time = self._time(layout, replace(costs, traffic=sent))
        if time.seconds >= most_seconds:
            return None
        return Candidate(
            layout=layout,
            config=config,
            overrides=layout.overrides(self.config),
            memory=memory,
            time=time,
            mfu=self._mfu(layout, time),
            traffic=sent,
        )

    def _loads(self, layout: Layout) -> list[list[Load]]:
        """The stages of each pipeline rank; PartitionError: fewer blocks than stages."""
        if layout.pipeline == 1:
            return [even_loads(self.model, layout)]
        ranks = rank_of_stage(layout.schedule, layout.pipeline, layout.stages_per_rank)
        if ranks not in self._stages:
            self._stages[ranks] = partition(self.model.balance, ranks)
        return [loads_of(self.model, self._stages[ranks], ranks, rank) for rank in range(layout.pipeline)]

    def _memory(self, layout: Layout, fractions: ShardFractions, loads: Sequence[Sequence[Load]]) -> PeakMemory:
        peaks = [
            peak_use(self.model, layout, fractions, of_rank, live_stages(layout, rank))
            for rank, of_rank in enumerate(loads)
        ]
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank][1].total)
        phase, use = peaks[worst]
        use = replace(use, runtime=self.machines.runtime_bytes)
        first = layout.processes // layout.pipeline * worst
        return PeakMemory(rank=first, phase=phase, use=use, low_bytes=use.total * _LOW, high_bytes=use.total * _HIGH)

    def _traffic(
        self, layout: Layout, strategy: Strategy, loads: Sequence[Sequence[Load]]
    ) -> tuple[AxisTraffic, ...]:
        sizes = replace(self.model.sizes[layout.tensor], recomputes=layout.recompute is not None)
        if len(loads) > 1:
            sizes = replace(sizes, of_worst_stage=max(self._elements(of_rank) for of_rank in loads))
        return traffic(strategy, sizes, devices_per_machine=self.machines.per_machine)

    def _elements(self, loads: Sequence[Load]) -> int:
        model = self.model
        whole = [*model.kinds, model.prologue, model.epilogue]
        return round(
            sum(
                part.parameters * number
                for load in loads
                for part, number in zip(whole, (*load.blocks, load.prologue, load.epilogue), strict=True)
            )
        )

    def _seconds(self, layout: Layout, costs: RankCosts) -> float:
        return self._time(layout, costs).seconds

    def _time(self, layout: Layout, costs: RankCosts) -> StepTime:
        raise NotImplementedError

    def _mfu(self, layout: Layout, time: StepTime) -> float | None:
        peak = self.machines.hardware.half_flops
        if peak is None:
            return None
        tokens = self.config.train.global_batch_size * self.model.sequence_length
        return self.model.flops_per_token * tokens / (time.seconds * layout.processes * peak)


def _flops(costs: RankCosts) -> float:
    return sum(stage.forward.flops + stage.backward.flops for stage in costs.stages)


def _least(layout: Layout) -> ShardFractions:
    """Less than this a rank holds of no state; a pipeline gathers weights, and keeps gradients, for a whole step."""
    share = 1.0 / (layout.data * layout.context)
    if layout.pipeline > 1:
        return ShardFractions(optimizer=share)
    return ShardFractions(weights=share, gradients=share, optimizer=share)


def search_layouts(
    config: RunConfig, model: ModelConstants, machines: Machines, *, processes: int, best: int = 10
) -> SearchResult:
    """Give the fastest layouts that fit, by formulas.

    Args:
        config: of the run; its layout, micro batches and activation checkpointing are what is chosen.
        model: what `measure_constants` found for it.
        machines: where it is to run.
        processes: how many ranks.
        best: how many layouts to give at the most.
    """
    space = Space(config, model, processes, machines.per_machine)
    evaluator = Evaluator(config, model, machines)
    queue, num_pruned = _bounded(space, evaluator)
    num_bounded = num_evaluated = 0
    num_bounded = len(queue)
    heapify(queue)
    found: list[Candidate] = []
    while queue:
        least, number, layout = heappop(queue)
        worst = found[best - 1].time.seconds if len(found) >= best else inf
        if least >= worst:
            break
        if evaluator.least_seconds_with_model_axes(layout) >= worst:
            continue
        for one in space.shardings(layout):
            num_evaluated += 1
            candidate = evaluator.evaluate(one, most_seconds=worst)
            if candidate is not None:
                found.append(candidate)
        found.sort(key=lambda candidate: (candidate.time.seconds, candidate.memory.use.total))
        del found[best:]
    return SearchResult(
        candidates=tuple(found), num_bounded=num_bounded, num_pruned=num_pruned, num_evaluated=num_evaluated
    )


def _bounded(space: Space, evaluator: Evaluator) -> tuple[list[tuple[float, int, Layout]], int]:
    """Give all ways to compute a step that may fit, with the seconds that they take at the least."""
    found: list[tuple[float, int, Layout]] = []
    num_pruned = 0
    available = evaluator.available_bytes
    for grid in space.grids():
        for scheduled in space.schedules(grid):
            for mode in MODES:
                for layout in space.steps(replace(scheduled, recompute=mode)):
                    if evaluator.least_bytes(layout) > available:
                        num_pruned += 1
                        # Larger micro batches only need more.
                        break
                    found.append((evaluator.least_seconds(layout), len(found), layout))
    return found, num_pruned
