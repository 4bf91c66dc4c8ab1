"""Follows a rank of a pipeline through the actions of its schedule, on fake tensors: phases, and costs of each stage.

A step of very many micro batches holds no more than a shorter one in which as many are alive at a time, so the shorter
one is traced. Only gpipe keeps all. There the bytes of the micro batches that are left out are held as one tensor:

    F0  F1  (F2 ... F97 are left out)  F98  B0 ...       `_others` is held from the last forward to the first backward
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.batch import BatchPlan
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Schedule
from hfdist.config.train import Precision
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.instructions import Operation, computations
from hfdist.pipeline.planned import PlannedPipeline
from hfdist.pipeline.schedule import rank_of_stage, runs_microbatches, stages_per_rank
from hfdist.pipeline.stage_io import CARRIES, Header, unpack
from hfdist.pipeline.stage_module import StageModule
from hfdist.pipeline.timeline import Action, Recorder
from hfdist.planning.costs import OpCosts, StageCosts
from hfdist.planning.tracing.fake_task import FakeTask
from hfdist.planning.tracing.trace import GRADIENTS, Trace
from hfdist.strategies.engine import Batch
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.pipelines.pipeline import PipelineStrategy
from hfdist.strategies.traffic import Phase
from hfdist.topology import Topology

_OF_GPIPE = 3
"""Micro batches of gpipe that are traced: those that are left out keep as many bytes as the second one does."""
_BACKWARDS = (Action.backward, Action.backward_input, Action.backward_weight)
_PHASES = {Action.forward: Phase.forward, **dict.fromkeys(_BACKWARDS, Phase.backward)}
"""Phases of the actions that compute."""


def shorten(config: RunConfig, topology: Topology, batch: BatchPlan) -> BatchPlan:
    """Give a step of fewer micro batches in which each rank holds as many at a time; gpipe: three at the most."""
    schedule = config.strategy.schedule
    per_rank = stages_per_rank(schedule, config.strategy.stages_per_rank)
    num_microbatches = _fewest_microbatches(schedule, topology.pipeline, per_rank, batch.num_microbatches)
    return replace(
        batch,
        num_microbatches=num_microbatches,
        global_batch_size=num_microbatches * batch.micro_batch_size * batch.data_size,
    )


@lru_cache(maxsize=64)
def _fewest_microbatches(schedule: Schedule, num_ranks: int, per_rank: int, num_microbatches: int) -> int:
    if schedule is Schedule.gpipe:
        return min(num_microbatches, _OF_GPIPE)
    ranks = rank_of_stage(schedule, num_ranks, per_rank)
    held = most_held(schedule, ranks, num_microbatches)
    # A stage cannot hold more micro batches than a step has: the shorter step has at least the most that one holds.
    fewest = max(max(moment) for moments in held for moment in moments)
    for number in range(fewest, num_microbatches):
        fits = runs_microbatches(schedule, num_ranks, per_rank, number)
        if fits and most_held(schedule, ranks, number) == held:
            return number
    return num_microbatches


def most_held(schedule: Schedule, ranks: tuple[int, ...], num_microbatches: int) -> list[set[tuple[int, ...]]]:
    """Give for each rank the moments in which it holds the most micro batches.

    A moment of a rank with stages a and b is a tuple of integers; moments with equally many micro batches are all in:

        (micro batches of a, micro batches of b, 1 if a has gradients, 1 if b has gradients)

    A micro batch counts from its forward until all its gradients are there.
    """
    moments_of_ranks = []
    for own in computations(schedule, ranks, num_microbatches):
        held: dict[int, int] = dict.fromkeys(sorted({one.stage for one in own}), 0)
        has_gradients = dict.fromkeys(held, 0)
        # Micro batches that are held in each moment.
        moments: dict[tuple[int, ...], int] = {}
        for one in own:
            if one.operation is Operation.forward:
                held[one.stage] += 1
                moments[*held.values(), *has_gradients.values()] = sum(held.values())
            elif one.operation in (Operation.backward, Operation.backward_weight):
                held[one.stage] -= 1
                has_gradients[one.stage] = 1
        most = max(moments.values())
        moments_of_ranks.append({moment for moment, number in moments.items() if number == most})
    return moments_of_ranks


class PipelineTrace(Recorder):
    """Follows the actions of a rank: tells the trace which phase has come, and sums the costs of each stage.

    Args:
        trace: the trace of the rank.
        topology: the topology of the run, with the rank's place in it.
        left_out: number of micro batches that gpipe would keep beside those that are traced.
    """

    def __init__(self, trace: Trace, topology: Topology, left_out: int) -> None:
        super().__init__(rank=topology.pipeline_rank, device=torch.device("cpu"))
        self._trace = trace
        self._left_out = left_out
        self.model: nn.Module | None = None
        """The rank's part of the model, set once it is built: the trace counts its gradients."""
        self._costs: dict[tuple[int, Phase], OpCosts] = defaultdict(OpCosts)
        self._forwards: dict[int, int] = defaultdict(int)
        """Number of forwards of each stage so far."""
        self._is_begun = False
        self._kept = 0.0
        """Bytes of activations that the last forward has left."""
        self._others: torch.Tensor | None = None
        """As many bytes as the micro batches that are left out keep."""

    def stages(self) -> tuple[StageCosts, ...]:
        """Give the costs of one micro batch in each stage of the rank, in order."""
        shares = {stage: 1 / number for stage, number in sorted(self._forwards.items())}
        return tuple(
            StageCosts(
                forward=self._costs[stage, Phase.forward] * share, backward=self._costs[stage, Phase.backward] * share
            )
            for stage, share in shares.items()
        )

    def span(self, action: Action, *, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Give the context of an action: it counts what the action computes; other actions, as sends, have none."""
        phase = _PHASES.get(action)
        return nullcontext() if phase is None else self._follow(phase, stage)

    @contextmanager
    def _follow(self, phase: Phase, stage: int) -> Iterator[None]:
        trace = self._trace
        trace.phase = phase
        if not self._is_begun:
            # What ran before the first action, to learn the shapes that stages hand on, is no part of a step.
            self._is_begun = True
            trace.forget_peak()
        before, held = trace.costs(phase), trace.held.activations
        if self._left_out and phase is Phase.forward and self._forwards[stage] == _OF_GPIPE - 1:
            self._others = torch.empty(round(self._left_out * self._kept), dtype=torch.uint8)
        yield
        after = trace.costs(phase)
        self._costs[stage, phase] += OpCosts(
            flops=after.flops - before.flops,
            moved_bytes=after.moved_bytes - before.moved_bytes,
            kernels=after.kernels - before.kernels,
        )
        if phase is Phase.forward:
            self._forwards[stage] += 1
            self._kept = trace.held.activations - held
        else:
            self._others = None
            assert self.model is not None
            gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
            trace.hold(map(local_tensor, gradients), GRADIENTS)


def find_header(model: PreTrainedModel, config: RunConfig, batch: Batch) -> Header:
    """Give the header, which describes the tensors that the first block of a whole fake model hands on."""
    blocks = find_block_parts(model)
    half = torch.float16 if config.train.precision is Precision.fp16 else torch.bfloat16
    autocast = torch.autocast("cpu", half, enabled=config.train.precision is not Precision.fp32)
    with Trace(), autocast:
        sent = StageModule(model, blocks, range(1), CARRIES[0], {}).run(lambda stage: stage(**batch), None)
    return unpack(sent)[0]


def plan_pipeline(
    config: RunConfig, strategy: PipelineStrategy, recorder: PipelineTrace, *, on_cpu: bool
) -> Callable[[PreTrainedModel], None]:
    """Give a function that looks at the whole model, before it is split, so that the strategy needs no other rank.

    A stage learns the shapes that it receives from the rank before it; a plan has no such rank.
    """

    def look(model: PreTrainedModel) -> None:
        # The strategy refuses a model of one block.
        if len(find_block_parts(model)) > 1:
            batch = FakeTask(config, model, None, None).batch(config.train.micro_batch_size)
            strategy.planned = PlannedPipeline(find_header(model, config, batch), recorder, receives_early=on_cpu)

    return look
