"""Traces a step of one rank, in any layout: its real engine, on fake tensors and a fake process group.

Nothing is allocated and no other process exists. What is traced is the last micro batch of a later step:

    fake model -> engine -> optimizer's state, gradients -> | forward -> backward -> optimizer's step
                                                    `state` ^ `peak` and `costs`: from here to the end
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

# Not public; see fake_ranks.py.
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.checks.preflight import plan_run
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Schedule
from hfdist.planning.costs import PeakMemory, RankCosts, StageCosts
from hfdist.planning.tracing.as_trainer import find_loss_head, make_optimizer, prepare_as_trainer, run_step
from hfdist.planning.tracing.fake_model import make_fake_model, quantize_fake
from hfdist.planning.tracing.fake_ranks import deepspeed_of, fake_ranks, fake_tensors
from hfdist.planning.tracing.fake_task import FakeTask
from hfdist.planning.tracing.fake_teacher import make_teaching
from hfdist.planning.tracing.trace import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, Trace
from hfdist.strategies.base import Strategy
from hfdist.strategies.deepspeed.buckets import rank_with_most_gradients
from hfdist.strategies.engine import Engine
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.select import select_strategy
from hfdist.strategies.step_memory import MemoryUse
from hfdist.strategies.traffic import Phase
from hfdist.topology import Topology

if TYPE_CHECKING:
    from hfdist.planning.tracing.pipeline_trace import PipelineTrace
    from hfdist.strategies.deepspeed.zero import ZeroStrategy
    from hfdist.strategies.pipelines.pipeline import PipelineStrategy

_RANGES = {"cpu": (0.97, 1.03), "cuda": (0.97, 1.15)}
"""Range of a peak, as shares of the traced one. On a CPU: how traces and measured peaks differ (docs/plan.md). A GPU's
allocator rounds sizes up and keeps pieces that fit nothing; and its kernels have workspaces of their own."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Memory and operations of a rank in a step."""

    peak: PeakMemory
    costs: RankCosts
    """Costs of the rank, without traffic."""
    state: MemoryUse
    """Memory of the rank between steps."""


class _Traced(NamedTuple):
    """A trace that has ended."""

    trace: Trace
    state: MemoryUse
    """Memory between steps."""
    stages: tuple[StageCosts, ...] | None = None
    """Costs of each stage of a pipeline's rank; None: the trace has the costs of the whole model."""


def trace_rank(
    config: RunConfig, architecture: PreTrainedConfig, *, world_size: int, rank: int, device_type: str = "cpu"
) -> RankTrace:
    """Trace a step of one rank. No process group may exist before it, and none is left after it.

    Tensors of the CPU stand for those of a GPU. So sdpa is the flash attention of the CPU, which keeps what that of a
    GPU keeps, but with a mask a GPU pads the mask; autocast widens more operations on a GPU, such as a layer norm; and
    what is compiled there is traced as it is written. Activations that wait in host memory count as on the device.

    Args:
        config: the run's config.
        architecture: the model's config, with the vocabulary of the tokenizer.
        world_size: processes of the run.
        rank: the rank to trace.
        device_type: `cpu` or `cuda`: where the run is to be.

    Raises:
        ConfigError: as the run itself would, before its first step.
    """
    topology, batch = plan_run(config, world_size=world_size, rank=rank)
    # Selected first for the whole batch, as in a run: it raises what the run would raise.
    select = partial(select_strategy, config.strategy, config.train, topology=topology, device_type=device_type)
    strategy = select(batch=batch)
    if topology.pipeline > 1:
        # Imported here: it takes time that other layouts save.
        from hfdist.planning.tracing.pipeline_trace import shorten

        strategy = select(batch=shorten(config, topology, batch))
    with fake_ranks(topology), fake_tensors(strategy), deepspeed_of(strategy):
        if config.strategy.sharding.is_deepspeed and topology.pipeline == 1:
            traced = _trace_zero(config, architecture, cast("ZeroStrategy", strategy), device_type)
        elif topology.pipeline > 1:
            pipeline = cast("PipelineStrategy", strategy)
            traced = _trace_pipeline(config, architecture, pipeline, device_type, batch.num_microbatches)
        else:
            trace = Trace(copies_gathered=device_type == "cpu")
            traced = _trace_engine(config, architecture, strategy, device_type, trace)
    return _to_rank_trace(config, topology, traced, device_type)


def _trace_zero(config: RunConfig, architecture: PreTrainedConfig, strategy: ZeroStrategy, device_type: str) -> _Traced:
    """Trace a step of DeepSpeed's own engine."""
    from hfdist.planning.tracing.deepspeed_trace import trace_deepspeed

    trace = Trace(copies_gathered=device_type == "cpu")
    whole = make_fake_model(config, architecture, strategy)
    quantize_fake(whole, config)
    loss_head = find_loss_head(config, whole, strategy, device_type)
    engine = strategy.build(whole)
    state = trace_deepspeed(
        config,
        strategy,
        engine,
        task=FakeTask(config, cast(PreTrainedModel, engine.model), loss_head, make_teaching(config, strategy)),
        make_optimizer=lambda: make_optimizer(config, engine, device_type, sets_up=False),
        trace=trace,
    )
    return _Traced(trace, state)


def _trace_pipeline(
    config: RunConfig,
    architecture: PreTrainedConfig,
    strategy: PipelineStrategy,
    device_type: str,
    num_microbatches: int,
) -> _Traced:
    """Trace a whole step of a pipeline's rank, with the costs of each of its stages.

    `num_microbatches`: those of the run; the strategy's own batch may be shorter.
    """
    from hfdist.planning.tracing.pipeline_trace import PipelineTrace, plan_pipeline

    trace = Trace(copies_gathered=device_type == "cpu")
    # Only gpipe holds all micro batches at a time, and so more than the shorter step does.
    is_gpipe = config.strategy.schedule is Schedule.gpipe
    left_out = num_microbatches - strategy.batch.num_microbatches if is_gpipe else 0
    recorder = PipelineTrace(trace, strategy.topology, left_out)
    look = plan_pipeline(config, strategy, recorder, on_cpu=device_type == "cpu")
    traced = _trace_engine(config, architecture, strategy, device_type, trace, look, recorder)
    return traced._replace(stages=recorder.stages())


def _trace_engine(
    config: RunConfig,
    architecture: PreTrainedConfig,
    strategy: Strategy,
    device_type: str,
    trace: Trace,
    before_split: Callable[[PreTrainedModel], None] = lambda _: None,
    recorder: PipelineTrace | None = None,
) -> _Traced:
    """Trace a step of an engine of hfdist.

    `before_split` is called with the whole model; `recorder` follows the actions of a pipeline.
    """
    whole = make_fake_model(config, architecture, strategy, before_split)
    quantize_fake(whole, config)
    loss_head = find_loss_head(config, whole, strategy, device_type)
    # A trace computes for real what comes from whole numbers alone.
    with nullcontext() if recorder is None else Trace():
        engine = strategy.build(whole)
    model = engine.model
    if recorder is not None:
        recorder.model = model
    prepare_as_trainer(model, config)
    task = FakeTask(config, cast(PreTrainedModel, model), loss_head, make_teaching(config, strategy))
    trace.hold((*map(local_tensor, (*model.parameters(), *task.teacher_tensors())), *model.buffers()), WEIGHTS)
    is_zero = config.strategy.sharding.is_deepspeed
    with trace if is_zero else nullcontext():
        # DeepSpeed makes flat buffers here, which count; other optimizers make nothing yet.
        optimizer = make_optimizer(config, engine, device_type)
    _name_gradients(engine, strategy, trace)
    with trace:
        if is_zero:
            from hfdist.planning.tracing.deepspeed_trace import name_what_is_held

            # DeepSpeed's first step makes the optimizer's state.
            run_step(config, strategy, engine, optimizer, task, trace)
            name_what_is_held(engine, cast(Any, engine)._engine, trace)
        else:
            make_state(optimizer, model, trace)
        if strategy.batch.num_microbatches == 1 or recorder is not None:
            # A pipeline's step is traced whole.
            optimizer.zero_grad()
        state = trace.held
        trace.forget_peak()
        run_step(config, strategy, engine, optimizer, task, trace)
    return _Traced(trace, state)


def _name_gradients(engine: Engine, strategy: Strategy, trace: Trace) -> None:
    """Let the trace count gradients, and the buffers that reduce them, by their kinds as soon as they exist."""
    if engine.compressor is not None:
        trace.hold(engine.compressor.residuals.values(), BUFFERS)
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: trace.hold([local_tensor(p.grad)], GRADIENTS))
    if strategy.topology.world_size > 1 and not engine.reduces_gradients:
        put_gradients_in_buckets(engine.model, trace)


def _to_rank_trace(config: RunConfig, topology: Topology, traced: _Traced, device_type: str) -> RankTrace:
    """Give what a trace has found as a plan counts it: memory of the device alone, and the costs of each stage."""
    trace, state, stages = traced
    peaks = {phase: trace.peak_of(phase) for phase in Phase}
    if device_type == "cuda" and config.strategy.offload is Offload.cpu:
        # FSDP2 leaves all but what is gathered on the host; DeepSpeed what the optimizer steps.
        on_host: dict[str, float] = {"gradients": 0, "optimizer": 0}
        if not config.strategy.sharding.is_deepspeed:
            on_host["weights"] = 0
        peaks = {phase: replace(use, **on_host) for phase, use in peaks.items()}
        state = replace(state, **on_host)
    phase = max(peaks, key=lambda phase: peaks[phase].total)
    low, high = (share * peaks[phase].total for share in _RANGES[device_type])
    peak = PeakMemory(rank=topology.rank, phase=phase, use=peaks[phase], low_bytes=low, high_bytes=high)
    if stages is None:
        stages = (StageCosts(forward=trace.costs(Phase.forward), backward=trace.costs(Phase.backward)),)
    if config.task.name.traits.reads_twice:
        # Each step runs two forwards. The first holds less than the second, as no backward follows it: peaks stay.
        stages = tuple(stage.with_passes(2) for stage in stages)
    costs = RankCosts(stages=stages, optimizer=trace.costs(Phase.optimizer))
    return RankTrace(peak=peak, costs=costs, state=state)


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, model: nn.Module, trace: Trace) -> None:
    """Make the optimizer's state and the gradients, as they are after a micro batch."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            trace.hold([local_tensor(parameter.grad)], GRADIENTS)
    trace.phase = Phase.optimizer
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    trace.hold((local_tensor(value) for value in states if torch.is_tensor(value)), OPTIMIZER)
    trace.phase = Phase.forward


def put_gradients_in_buckets(model: nn.Module, trace: Trace) -> None:
    """Hold gradients as DDP does: copied into flat memory that stays, of which they become views.

    DDP's own reducer is C++ and reads values. The gradients that it copies are freed at once.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        bucket = torch.empty_like(parameter)
        trace.hold([bucket], GRADIENTS)

        def copy(parameter: torch.Tensor, bucket: torch.Tensor = bucket) -> None:
            assert parameter.grad is not None
            bucket.copy_(parameter.grad)
            parameter.grad = bucket.view(bucket.shape)

        parameter.register_post_accumulate_grad_hook(copy)


def fullest_pipeline(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy) -> range:
    """Give the ranks of the pipeline with the most memory; without a pipeline, one rank.

    The first rank of FSDP2 and of a divided vocabulary has the largest share; ranks along other axes hold the same.
    """
    pipelines = strategy.topology.pipelines
    if not strategy.keeps_uneven_gradients:
        return pipelines[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole = Engine(make_fake_model(config, architecture, strategy))
        optimizer = make_optimizer(config, whole, sets_up=False)
    groups = [[parameter.numel() for parameter in group["params"]] for group in optimizer.param_groups]
    return pipelines[rank_with_most_gradients(groups, strategy.topology.data)]
