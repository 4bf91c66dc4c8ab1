"""Who takes part in the pipeline benchmark: one builder for each runtime, and the table of them.

A new runtime is one builder and its rows in `CONTENDERS`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.emulated import HIDDEN_SIZE, Durations, EmulatedStage, Leg, sleep_seconds

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """What every contender does in one step; durations are those of one rank for one micro batch."""

    num_ranks: int
    num_microbatches: int
    durations: Durations

    def bound_seconds(self, stages_per_rank: int) -> float:
        """The least time of a step: the last rank waits for its first input, then never idles."""
        durations = self.durations
        busy = durations.forward_seconds + durations.input_seconds + durations.weight_seconds
        wait = (self.num_ranks - 1) * durations.forward_seconds / stages_per_rank
        return self.num_microbatches * busy + wait


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    `splits` says whether the schedule runs input and weight gradients apart; `build(work, log)` is called on every rank
    and gives back one optimizer step to time.
    """

    runtime: str
    schedule: str
    stages_per_rank: int
    splits: bool
    build: Callable[[Work, list[Leg]], Step]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The loss of one micro batch."""
    return (output - target).square().mean()


class TorchPipeline:
    """torch.distributed.pipelining used directly: `PipelineStage` and the schedule's own class."""

    def __init__(self, schedule: str, stages_per_rank: int, work: Work, log: list[Leg]) -> None:
        rank, num_ranks = dist.get_rank(), work.num_ranks
        num_stages = num_ranks * stages_per_rank
        owned = [rank, num_stages - 1 - rank] if schedule in V_SHAPED else range(rank, num_stages, num_ranks)
        durations = work.durations.shared_by(stages_per_rank)
        self.modules = {stage: EmulatedStage(stage, durations, log) for stage in owned}
        self.optimizer = _optimizer(self.modules.values())
        stages = [
            PipelineStage(module, stage, num_stages, torch.device("cpu")) for stage, module in self.modules.items()
        ]
        kind: Any = get_schedule_class(schedule)
        plan = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self.runner = kind(plan, work.num_microbatches, loss_fn=squared_error)
        batch = torch.ones(work.num_microbatches, HIDDEN_SIZE)
        self._inputs = (batch,) if 0 in owned else ()
        self._target = torch.zeros_like(batch) if num_stages - 1 in owned else None

    def step(self) -> None:
        """One optimizer step."""
        self.runner.step(*self._inputs, target=self._target, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_torch(schedule: str, stages_per_rank: int, work: Work, log: list[Leg]) -> Step:
    """Peer: torch's schedules as they are."""
    return TorchPipeline(schedule, stages_per_rank, work, log).step


def build_deepspeed(work: Work, log: list[Leg]) -> Step:
    """Peer: DeepSpeed's PipelineModule, which runs 1F1B with one stage a rank."""
    logger.setLevel(logging.ERROR)
    # Nothing here calls a compiled operator, and compiling takes a minute.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(verbose=False)
    layers = [EmulatedStage(stage, work.durations, log) for stage in range(work.num_ranks)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": work.num_microbatches,
        "steps_per_print": 1_000_000,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        model = PipelineModule(layers, num_stages=work.num_ranks, loss_fn=squared_error, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer([model]), config=config)
    microbatch = (torch.ones(1, HIDDEN_SIZE), torch.zeros(1, HIDDEN_SIZE))

    def step() -> None:
        engine.train_batch(itertools.repeat(microbatch))

    return step


def build_alone(work: Work, log: list[Leg]) -> Step:
    """No pipeline: every rank runs its own legs, then waits as the bound does.

    What this takes above the bound is this machine's noise and the cost of autograd, which no runtime can avoid.
    """
    stages_per_rank = 2
    # Odd numbers: no two ranks own neighbouring stages.
    stage = EmulatedStage(1 + 2 * dist.get_rank(), work.durations.shared_by(stages_per_rank), log)
    hidden = torch.ones(1, HIDDEN_SIZE, requires_grad=True)
    wait = Work(work.num_ranks, 0, work.durations).bound_seconds(stages_per_rank)

    def step() -> None:
        sleep_seconds(wait)
        for _ in range(work.num_microbatches * stages_per_rank):
            squared_error(stage(hidden), torch.zeros(1, HIDDEN_SIZE)).backward()

    return step


def _optimizer(modules: Iterable[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-3)


def _torch(schedule: str, stages_per_rank: int, splits: bool) -> Contender:
    return Contender("torch", schedule, stages_per_rank, splits, partial(build_torch, schedule, stages_per_rank))


CONTENDERS = (
    Contender("DeepSpeed", "1F1B", 1, False, build_deepspeed),
    _torch("GPipe", 1, splits=False),
    _torch("1F1B", 1, splits=False),
    _torch("Interleaved1F1B", 2, splits=False),
    _torch("InterleavedZeroBubble", 1, splits=True),
    _torch("InterleavedZeroBubble", 2, splits=True),
    _torch("ZBVZeroBubble", 2, splits=True),
    _torch("DualPipeV", 2, splits=True),
    Contender("none", "legs of one rank", 2, False, build_alone),
)
