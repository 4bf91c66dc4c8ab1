"""Makes a plan: the worst rank is traced, a step is timed, and the whole run follows from both.

A pipeline whose trace would take minutes is planned by the formulas of a search, from traces of single blocks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from hfdist.config.checks.preflight import plan_run
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Balance
from hfdist.models.adapter_parts import describe_parts
from hfdist.models.blocks import find_block_parts
from hfdist.models.loss.distillation import top_bytes
from hfdist.models.partitioning import Partitioning
from hfdist.models.trainable import TrainableParameters
from hfdist.optim.registry import stepped_whole
from hfdist.pipeline.partition import choose_stages
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.costs import AxisTraffic, PeakMemory
from hfdist.planning.island_traffic import IslandTraffic, exchanged_elements, island_traffic
from hfdist.planning.not_counted import not_counted
from hfdist.planning.plan import Plan
from hfdist.planning.planned_architecture import find_planned_architecture
from hfdist.planning.searching.evaluate import Evaluator, Machines
from hfdist.planning.searching.search import measure
from hfdist.planning.timing.step_time import StepParts, step_parts
from hfdist.planning.timing.traffic import of_task, sequence_flops, step_sizes, traffic
from hfdist.planning.tracing.fake_model import make_planned
from hfdist.planning.tracing.fake_teacher import measure_teacher
from hfdist.planning.tracing.memory import RankTrace, fullest_pipeline, trace_rank
from hfdist.planning.whole_run import with_steps
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import select_strategy
from hfdist.strategies.traffic import StepSizes

if TYPE_CHECKING:
    from hfdist.strategies.pipelines.pipeline import PipelineStrategy

_MOST_PASSES = 150
"""The most passes through a block, forward and backward, that are traced: each takes up to 0.4 CPU seconds."""
_PLACES = 3
"""Places of a pipeline that differ at the least: the first, the last, and all between."""


@dataclass(frozen=True, kw_only=True)
class _ModelFigures:
    """Figures of the whole model in a step, which no layout changes."""

    flops: float
    """FLOPs of all ranks in a step, as MFU counts them."""
    sizes: StepSizes
    adapter: str
    """What an adapter stands beside and trains; empty: there is none."""


@dataclass(frozen=True, kw_only=True)
class _LayoutFigures:
    """Memory, time and traffic of a step in the layout of the config."""

    memory: PeakMemory
    """The memory of the rank that holds most, still without what a process holds without a model."""
    parts: StepParts
    traffic: tuple[AxisTraffic, ...]
    is_traced: bool


def make_plan(
    config: RunConfig, machines: Machines, processes: int, architecture: PreTrainedConfig | None = None
) -> Plan:
    """Plan a run in the layout of its config. No process group may exist, and no weight is allocated.

    Args:
        config: the run's config.
        machines: the machines of the run, as `find_machines` gives them.
        processes: number of ranks of the run.
        architecture: the model's config; None: it is found by `find_planned_architecture`.

    Raises:
        ConfigError: as the run itself would, before its first step.
    """
    hardware = machines.hardware
    if architecture is None:
        architecture = find_planned_architecture(config, hardware.device_type)
    topology, batch = plan_run(config, world_size=processes)
    strategy = select_strategy(
        config.strategy, config.train, topology=topology, batch=batch, device_type=hardware.device_type
    )
    model = _measure_model(config, architecture, is_gpu=not hardware.is_cpu)
    figures = None
    if _is_long(config, strategy, model.sizes):
        figures = _by_formulas(config, architecture, machines, strategy)
    if figures is None:
        figures = _by_traces(config, architecture, machines, strategy, model.sizes)
    time = figures.parts.time
    plan = Plan(
        layout=f"{topology.describe()}; sharding {config.strategy.sharding.value}; {config.train.precision.value}",
        hardware=hardware.name,
        processes=processes,
        memory=figures.memory.with_runtime(machines.runtime_bytes),
        usable_bytes=machines.usable_bytes,
        flops_per_step=model.flops,
        time=time,
        ideal_seconds=figures.parts.ideal,
        timed_runs=0 if machines.factors is None else machines.factors.num_steps,
        tokens_per_step=(model.sizes.sequence_tokens or config.data.sequence_length) * config.train.global_batch_size,
        adapter=model.adapter,
        mfu=hardware.mfu(model.flops / time.seconds / processes),
        traffic=figures.traffic,
        islands=_island_traffic(config, strategy, model.sizes),
        max_steps=None,
        currency=config.cost.currency,
        kept_bytes_per_step=batch.tokens_per_step * _kept_bytes(config),
        is_traced=figures.is_traced,
        not_counted=not_counted(config, architecture),
    )
    plan = replace(plan, binds=_binds(plan))
    if config.train.epochs is not None:
        # How many steps an epoch has is known once the data are read.
        return plan
    return with_steps(plan, config, machines, config.train.max_steps)


def _measure_model(config: RunConfig, architecture: PreTrainedConfig, *, is_gpu: bool) -> _ModelFigures:
    with torch.device("meta"):
        model = make_planned(config, architecture)
        # Chosen before sizes are measured: only what is trained has gradients to compute and to send.
        TrainableParameters.of(config).choose(model, seed=config.train.seed, layout=Partitioning())
    sizes = step_sizes(
        model,
        config.train,
        tensor=config.strategy.tensor,
        is_gpu=is_gpu,
        stepped_whole=stepped_whole(config.optimizer, model),
        frozen=measure_teacher(config),
    )
    return _ModelFigures(
        flops=sequence_flops(model, config) * config.train.global_batch_size,
        sizes=of_task(sizes, config, model),
        adapter=describe_parts(model) if config.adapter.is_used else "",
    )


def _island_traffic(config: RunConfig, strategy: Strategy, sizes: StepSizes) -> IslandTraffic | None:
    """Give the bytes that islands send each other; None: there are no islands."""
    topology = strategy.topology
    exchanged = exchanged_elements(
        sizes,
        pipeline=topology.pipeline,
        expert=topology.expert,
        is_sharded=strategy.fractions.optimizer < 1,
    )
    return island_traffic(config.islands, exchanged, largest=sizes.embedding if sizes.trained_share == 1 else 0)


def _kept_bytes(config: RunConfig) -> int:
    """Give the bytes that a teacher's likeliest tokens take on disk for each target."""
    kept = config.task.teacher_top_k
    return 0 if kept is None else top_bytes(kept)


def _binds(plan: Plan) -> str:
    """Name what a step's time or the layout is bound by: `memory`, `compute` or `link`."""
    if not plan.fits:
        return "memory"
    return "link" if sum(plan.time.exposed.values()) > plan.time.compute else "compute"


# ---- by formulas ----


def _is_long(config: RunConfig, strategy: Strategy, sizes: StepSizes) -> bool:
    """Whether a trace of all stages would take minutes."""
    topology = strategy.topology
    if topology.pipeline <= _PLACES:
        return False
    # Imported here: it takes time that other layouts save.
    from hfdist.planning.tracing.pipeline_trace import shorten

    microbatches = shorten(config, topology, strategy.batch).num_microbatches
    return _PLACES * microbatches * sizes.num_blocks / topology.pipeline > _MOST_PASSES


def _by_formulas(
    config: RunConfig, architecture: PreTrainedConfig, machines: Machines, strategy: Strategy
) -> _LayoutFigures | None:
    """Give the figures of a pipeline by formulas; None: the formulas do not know such a layout."""
    stages = _stages(config, architecture, strategy)
    model = measure(config, architecture, machines, processes=1, as_asked=True)
    per_rank = stages_per_rank(config.strategy.schedule, config.strategy.stages_per_rank)
    layout = Layout.of(config, strategy.topology.world_size, per_rank)
    # A plan says of a layout that does not fit how much is missing; a search would drop it.
    unlimited = replace(machines, usable_bytes=math.inf)
    found = Evaluator(config, model, unlimited, stages).evaluate(layout)
    if found is None:
        return None
    parts = StepParts(time=found.time, ideal={})
    return _LayoutFigures(memory=found.memory, parts=parts, traffic=found.traffic, is_traced=False)


def _stages(
    config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy
) -> dict[tuple[int, ...], tuple[range, ...]]:
    """Give the blocks of each stage, as the config asks, by the ranks of the stages.

    Where blocks are to be timed, their operations stand for their seconds: those of a whole pipeline take long.

    Raises:
        ConfigError: the config asks for stages that the model cannot be cut into.
    """
    ranks, asked = cast("PipelineStrategy", strategy).rank_of_stage, config.strategy
    if asked.balance is Balance.measured:
        asked = replace(asked, balance=Balance.flops)
    with FakeTensorMode():
        model = make_planned(config, architecture)
        blocks = find_block_parts(model)
        return {ranks: choose_stages(model, blocks, asked, strategy.batch, ranks, config.train.precision)}


# ---- by traces ----


def _by_traces(
    config: RunConfig, architecture: PreTrainedConfig, machines: Machines, strategy: Strategy, sizes: StepSizes
) -> _LayoutFigures:
    """Give the figures of a layout by a trace of one rank, or of each place of a pipeline."""
    hardware = machines.hardware
    sent = traffic(strategy, sizes, devices_per_machine=machines.per_machine)
    traces = _trace(config, architecture, strategy, hardware.device_type)
    costs = [replace(trace.costs, traffic=sent) for trace in traces]
    return _LayoutFigures(
        memory=max((trace.peak for trace in traces), key=lambda peak: peak.use.total),
        parts=step_parts(costs, strategy, hardware, config.train, machines.factors),
        traffic=sent,
        is_traced=True,
    )


def _trace(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy, device: str) -> list[RankTrace]:
    """Give a trace for each place of a pipeline; without a pipeline, the trace of one rank.

    Of places with equal stages the first holds the most micro batches, and stands for all.
    """
    ranks = fullest_pipeline(config, architecture, strategy)
    kinds = _kinds_of_places(config, architecture, strategy)
    world_size = strategy.topology.world_size
    traces: dict[Hashable, RankTrace] = {}
    with warnings.catch_warnings():
        # What libraries say to developers, once for a plan and once for the run.
        warnings.simplefilter("ignore")
        for kind, rank in zip(kinds, ranks, strict=True):
            if kind not in traces:
                traces[kind] = trace_rank(config, architecture, world_size=world_size, rank=rank, device_type=device)
    return [traces[kind] for kind in kinds]


def _kinds_of_places(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy) -> Sequence[Hashable]:
    """Give a value for each rank of a pipeline; the values of two ranks are equal if both compute alike.

    Where blocks are timed to share them out, stages are not known yet: all values differ.
    """
    topology = strategy.topology
    if topology.pipeline == 1 or config.strategy.balance is Balance.measured:
        return range(topology.pipeline)
    with FakeTensorMode():
        model = make_planned(config, architecture)
        # A cast: to import the class takes time that other layouts save.
        kinds: list[Hashable] = cast("PipelineStrategy", strategy).kinds_of_places(model)
    return kinds
