"""Makes a plan: the worst rank is traced, a step is timed, and the whole run follows from both.

A pipeline whose trace would take minutes is planned by the formulas of a search, from traces of single blocks.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from hfdist.config.checks.preflight import plan_run
from hfdist.config.data import cache_dir
from hfdist.config.layout import Layout
from hfdist.config.model import Init
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Balance
from hfdist.config.task import Head, TaskName
from hfdist.energy.estimates import WATTS_PER_CORE
from hfdist.models import find_architecture, fit_vocabulary
from hfdist.models.adapter_parts import describe_parts
from hfdist.models.attention_choice import choose_attention
from hfdist.models.blocks import find_block_parts
from hfdist.models.encoders import check_pipeline, check_reads_texts
from hfdist.models.label_names import own_labels, set_labels
from hfdist.models.loss.distillation import top_bytes
from hfdist.models.partitioning import Partitioning
from hfdist.models.resolve import resolve_model
from hfdist.models.target_loss import check_target_loss
from hfdist.models.tokenizer import load_pretrained_tokenizer
from hfdist.models.trainable import TrainableParameters
from hfdist.optim.registry import stepped_whole
from hfdist.pipeline.partition import choose_stages
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.island_traffic import exchanged_elements, island_traffic
from hfdist.planning.not_counted import not_counted
from hfdist.planning.plan import Plan
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.search import measure
from hfdist.planning.timing.step_time import StepParts, step_parts
from hfdist.planning.timing.traffic import of_task, sequence_flops, step_sizes, traffic
from hfdist.planning.tracing.fake_model import make_planned
from hfdist.planning.tracing.fake_teacher import measure_teacher
from hfdist.planning.tracing.memory import RankTrace, fullest_pipeline, trace_rank
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import select_strategy
from hfdist.strategies.traffic import StepSizes

if TYPE_CHECKING:
    from hfdist.strategies.pipelines.pipeline import PipelineStrategy

_MOST_PASSES = 150
"""The most passes through a block, forward and backward, that are traced: each takes up to 0.4 CPU seconds."""
_PLACES = 3
"""Places of a pipeline that differ at the least: the first, the last, and all between."""


def find_planned_architecture(config: RunConfig, device_type: str = "cpu") -> PreTrainedConfig:
    """Give the model's config with the vocabulary that the run will have, as far as no data are read for it.

    `device_type`: `cpu` or `cuda`: where the run is to be.
    """
    model, folder = config.model, cache_dir(config.data)
    takes_size = model.init is Init.random and "vocab_size" not in model.config
    if not takes_size or model.tokenizer.name is None:
        # A tokenizer must not be fetched for nothing.
        model = replace(model, tokenizer=replace(model.tokenizer, name=None, revision=None))
    model = resolve_model(model, cache_dir=folder).model
    head = config.task.name.traits.head
    longest = config.data.longest_side if head is Head.targets else config.data.sequence_length
    architecture = find_architecture(model, sequence_length=longest, head=head)
    is_encoder = (head is Head.none or head.is_padded) and _reads_ahead(replace(config, model=model), architecture)
    if model.tokenizer.name is not None:
        tokenizer = load_pretrained_tokenizer(model, cache_dir=folder)
        fit_vocabulary(architecture, tokenizer, model)
    elif takes_size:
        # One that is trained has at most so many tokens.
        architecture.get_text_config().vocab_size = model.tokenizer.vocab_size
    if not (is_encoder or head.is_padded):
        choose_attention(replace(config, model=model), architecture, device_type)
    return architecture


def _reads_ahead(config: RunConfig, architecture: PreTrainedConfig) -> bool:
    """Whether the model is an encoder, and let it have its labels; ConfigError: it cannot do what the task asks."""
    head, labels = config.task.name.traits.head, config.data.labels
    if head is Head.targets:
        check_target_loss(config.model, architecture)
        return False
    if head.gives_labels:
        # Those of rows are not known, and of a ranking there is one number.
        names = [] if config.task.name is TaskName.rerank else labels.names or own_labels(architecture)
        set_labels(architecture, replace(labels, names=names))
    is_encoder = check_reads_texts(architecture, head=head, longest=config.data.sequence_length)
    if is_encoder:
        check_pipeline(architecture, head=head, pipeline=config.strategy.pipeline)
    return is_encoder


def make_plan(
    config: RunConfig, machines: Machines, processes: int, architecture: PreTrainedConfig | None = None
) -> Plan:
    """Plan a run in the layout of its config. No process group may exist, and nothing of a model is held.

    Args:
        config: of the run.
        machines: see `find_machines`.
        processes: how many there will be.
        architecture: of the model; None: it is found.

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
    flops, sizes, beside = _measure(config, architecture, is_gpu=not hardware.is_cpu)
    sent = traffic(strategy, sizes, devices_per_machine=machines.hardware.devices_per_machine)
    by_formulas = _by_formulas(config, architecture, machines, strategy) if _is_long(config, strategy, sizes) else None
    if by_formulas is None:
        traces = _trace(config, architecture, strategy, hardware.device_type)
        costs = [replace(trace.costs, traffic=sent) for trace in traces]
        parts = step_parts(costs if len(costs) > 1 else costs[0], strategy, hardware, config.train, machines.factors)
        memory = max((trace.peak for trace in traces), key=lambda peak: peak.use.total)
    else:
        parts, memory, sent = StepParts(time=by_formulas.time, ideal={}), by_formulas.memory, by_formulas.traffic
    exchanged = exchanged_elements(
        sizes,
        pipeline=topology.pipeline,
        expert=topology.expert,
        is_sharded=strategy.fractions.optimizer < 1,
    )
    tokens = (sizes.sequence_tokens or config.data.sequence_length) * config.train.global_batch_size
    plan = Plan(
        layout=f"{topology.describe()}; sharding {config.strategy.sharding.value}; {config.train.precision.value}",
        hardware=hardware.name,
        processes=processes,
        memory=memory.with_runtime(machines.runtime_bytes),
        usable_bytes=machines.usable_bytes,
        flops_per_step=flops,
        time=parts.time,
        ideal_seconds=parts.ideal,
        timed_runs=0 if machines.factors is None else machines.factors.num_steps,
        tokens_per_step=tokens,
        adapter=beside,
        mfu=hardware.mfu(flops / parts.time.seconds / processes),
        traffic=sent,
        islands=island_traffic(config.islands, exchanged, largest=sizes.embedding if sizes.trained_share == 1 else 0),
        max_steps=None,
        currency=config.cost.currency,
        kept_bytes_per_step=batch.tokens_per_step * _kept_bytes(config),
        is_traced=by_formulas is None,
    )
    plan = replace(plan, binds=_binds(plan), not_counted=not_counted(config, architecture))
    return plan if config.train.epochs is not None else with_steps(plan, config, machines, config.train.max_steps)


def _kept_bytes(config: RunConfig) -> int:
    """Give the bytes that a teacher's likeliest tokens take on disk for each target."""
    kept = config.task.teacher_top_k
    return 0 if kept is None else top_bytes(kept)


def with_steps(plan: Plan, config: RunConfig, machines: Machines, max_steps: int | None) -> Plan:
    """Add what the whole run takes."""
    plan = replace(plan, max_steps=max_steps)
    if plan.hours is None:
        return plan
    cost, hardware = config.cost, machines.hardware
    # Where ranks compute on CPUs, the device that has a price is the host.
    devices = math.ceil(plan.processes / machines.hardware.devices_per_machine) if hardware.is_cpu else plan.processes
    price = hardware.price_per_hour if cost.price_per_hour is None else cost.price_per_hour
    watts = _watts(config, machines, plan.processes)
    kwh = None if watts is None else watts * plan.hours / 1000
    parts = [None if price is None else price * devices * plan.hours]
    parts += [] if cost.price_per_kwh is None else [None if kwh is None else kwh * cost.price_per_kwh]
    known = [part for part in parts if part is not None]
    return replace(plan, kwh=kwh, cost=sum(known) if known else None)


def _measure(config: RunConfig, architecture: PreTrainedConfig, *, is_gpu: bool) -> tuple[float, StepSizes, str]:
    """Give the FLOPs and the sizes of a step, and what an adapter stands beside."""
    with torch.device("meta"):
        model = make_planned(config, architecture)
        # Chosen before sizes are measured: only what is trained has gradients to compute and to send.
        TrainableParameters.of(config).choose(model, seed=config.train.seed, layout=Partitioning())
    whole, tensor = stepped_whole(config.optimizer, model), config.strategy.tensor
    sizes = step_sizes(
        model, config.train, tensor=tensor, is_gpu=is_gpu, stepped_whole=whole, frozen=measure_teacher(config)
    )
    flops = sequence_flops(model, config) * config.train.global_batch_size
    return flops, of_task(sizes, config, model), describe_parts(model) if config.adapter.is_used else ""


def _is_long(config: RunConfig, strategy: Strategy, sizes: StepSizes) -> bool:
    """Whether a trace of all stages would take minutes."""
    topology = strategy.topology
    if topology.pipeline <= _PLACES:
        return False
    # It takes time that other layouts save.
    from hfdist.planning.tracing.pipeline_trace import shorten

    microbatches = shorten(config, topology, strategy.batch).num_microbatches
    return _PLACES * microbatches * sizes.num_blocks / topology.pipeline > _MOST_PASSES


def _by_formulas(
    config: RunConfig, architecture: PreTrainedConfig, machines: Machines, strategy: Strategy
) -> Candidate | None:
    """Give what formulas say of a pipeline, whether it fits or not; None: they do not know such a layout."""
    stages = _stages(config, architecture, strategy)
    model = measure(config, architecture, machines, processes=1, as_asked=True)
    per_rank = stages_per_rank(config.strategy.schedule, config.strategy.stages_per_rank)
    layout = Layout.of(config, strategy.topology.world_size, per_rank)
    evaluator = Evaluator(config, model, replace(machines, usable_bytes=math.inf), stages)
    return evaluator.evaluate(layout)


def _stages(
    config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy
) -> dict[tuple[int, ...], tuple[range, ...]]:
    """Give the blocks of each stage, as the config asks, by the ranks of the stages; ConfigError: it asks for others.

    Where blocks are to be timed, their operations stand for their seconds: those of a whole pipeline take long.
    """
    ranks, asked = cast("PipelineStrategy", strategy).rank_of_stage, config.strategy
    if asked.balance is Balance.measured:
        asked = replace(asked, balance=Balance.flops)
    with FakeTensorMode():
        model = make_planned(config, architecture)
        blocks = find_block_parts(model)
        return {ranks: choose_stages(model, blocks, asked, strategy.batch, ranks, config.train.precision)}


def _trace(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy, device: str) -> Sequence[RankTrace]:
    """Give a trace for each place of a pipeline.

    Of places with equal stages the first holds the most micro batches, and stands for all.
    """
    ranks = fullest_pipeline(config, architecture, strategy)
    with warnings.catch_warnings():
        # What libraries say to developers, once for a plan and once for the run.
        warnings.simplefilter("ignore")
        found: dict[Hashable, RankTrace] = {}
        for kind, rank in zip(kinds := _kinds_of_places(config, architecture, strategy), ranks, strict=True):
            if kind not in found:
                found[kind] = trace_rank(
                    config, architecture, world_size=strategy.topology.world_size, rank=rank, device_type=device
                )
    return [found[kind] for kind in kinds]


def _kinds_of_places(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy) -> Sequence[Hashable]:
    """Equal for ranks of a pipeline that compute alike; all differ where blocks are timed to share them out."""
    topology = strategy.topology
    if topology.pipeline == 1 or config.strategy.balance is Balance.measured:
        return range(topology.pipeline)
    with FakeTensorMode():
        model = make_planned(config, architecture)
        # A cast: to import the class takes time that other layouts save.
        kinds: list[Hashable] = cast("PipelineStrategy", strategy).kinds_of_places(model)
    return kinds


def _binds(plan: Plan) -> str:
    if not plan.fits:
        return "memory"
    return "link" if sum(plan.time.exposed.values()) > plan.time.compute else "compute"


def _watts(config: RunConfig, machines: Machines, processes: int) -> float | None:
    """Give the power of all devices, or of the hosts where they compute themselves."""
    hardware, cost = machines.hardware, config.cost
    if hardware.is_cpu:
        of_host = cost.host_watts or WATTS_PER_CORE * (os.cpu_count() or 1)
        return of_host * math.ceil(processes / machines.hardware.devices_per_machine)
    watts = hardware.watts if cost.device_watts is None else cost.device_watts
    return None if watts is None else watts * processes
