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

from benchmarks.emulated import HIDDEN_SIZE, EmulatedStage, Leg, sleep_seconds
from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.pipeline import Pipeline
from hfdist.pipeline.schedule import rank_of_stage
from hfdist.pipeline.stage_io import Activations
from hfdist.pipeline.timeline import Recorder

NAMES = {
    Schedule.gpipe: "GPipe",
    ONE_F_ONE_B: "1F1B",
    Schedule.interleaved_1f1b: "Interleaved1F1B",
    Schedule.interleaved_zero_bubble: "InterleavedZeroBubble",
    Schedule.zbv: "ZBVZeroBubble",
    Schedule.dualpipev: "DualPipeV",
}
"""What torch calls our schedules."""

CPU = torch.device("cpu")

Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """What every contender does in one step."""

    num_ranks: int
    num_microbatches: int
    leg_seconds: float
    """Seconds that a forward takes, and an input gradient, and a weight gradient: each for one micro batch in all
    stages of one rank."""

    def bound_seconds(self, stages_per_rank: int) -> float:
        """The least time of a step: the last rank waits for its first input, then never idles."""
        return self.num_microbatches * 3 * self.leg_seconds + self.wait_seconds(stages_per_rank)

    def wait_seconds(self, stages_per_rank: int) -> float:
        """The least time until the last rank has its first input."""
        return (self.num_ranks - 1) * self.leg_seconds / stages_per_rank


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


def build_torch(schedule: Schedule, stages_per_rank: int, work: Work, log: list[Leg]) -> Step:
    """Peer: torch.distributed.pipelining used directly: `PipelineStage` and the schedule's own class."""
    placement, modules = _make_stages(schedule, stages_per_rank, work, log)
    optimizer = _optimizer(modules.values())
    stages = [PipelineStage(module, stage, len(placement), CPU) for stage, module in modules.items()]
    kind: Any = get_schedule_class(NAMES[schedule])
    plan = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    runner = kind(plan, work.num_microbatches, loss_fn=squared_error)
    batch = torch.ones(work.num_microbatches, HIDDEN_SIZE)
    inputs = (batch,) if 0 in modules else ()
    target = torch.zeros_like(batch) if len(placement) - 1 in modules else None

    def step() -> None:
        runner.step(*inputs, target=target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


class EmulatedView:
    """What `Pipeline` needs of a `View`, around an emulated stage: the model that is called is its last output."""

    def __init__(self, module: EmulatedStage, *, is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        self.parameters = module.parameters
        self.model = module

    def run(self, call: Callable[[Any], Tensor], incoming: Activations | None) -> Activations | Tensor:
        """Run one forward."""
        output = self.model(torch.ones(1, HIDDEN_SIZE) if incoming is None else incoming.outputs["hidden"])
        return call(output) if self.is_last else Activations({"hidden": output})


def build_hfdist(schedule: Schedule, stages_per_rank: int, work: Work, log: list[Leg]) -> Step:
    """Ours, as the Trainer runs it but for the model."""
    placement, modules = _make_stages(schedule, stages_per_rank, work, log)
    optimizer = _optimizer(modules.values())
    views: dict[int, Any] = {
        stage: EmulatedView(module, is_first=stage == 0, is_last=stage == len(placement) - 1)
        for stage, module in modules.items()
    }
    group: Any = dist.group.WORLD
    pipeline = Pipeline(
        views,
        schedule,
        P2PChannel(placement, group, CPU),
        num_microbatches=work.num_microbatches,
        recorder=Recorder(rank=dist.get_rank(), device=CPU),
        splits_backward=True,
    )
    microbatches = [{"target": torch.zeros(1, HIDDEN_SIZE)}] * work.num_microbatches

    def loss(output: Any, microbatch: dict[str, Tensor]) -> Tensor:
        return squared_error(output, microbatch["target"])

    def step() -> None:
        pipeline.forward_backward(list(map(contextlib.nullcontext, microbatches)), loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_deepspeed(work: Work, log: list[Leg]) -> Step:
    """Peer: DeepSpeed's PipelineModule, which runs 1F1B with one stage a rank."""
    logger.setLevel(logging.ERROR)
    # Nothing here calls a compiled operator, and compiling takes a minute.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(verbose=False)
    layers = [EmulatedStage(stage, work.leg_seconds, log) for stage in range(work.num_ranks)]
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
    stage = EmulatedStage(1 + 2 * dist.get_rank(), work.leg_seconds / stages_per_rank, log)
    hidden = torch.ones(1, HIDDEN_SIZE, requires_grad=True)

    def step() -> None:
        sleep_seconds(work.wait_seconds(stages_per_rank))
        for _ in range(work.num_microbatches * stages_per_rank):
            squared_error(stage(hidden), torch.zeros(1, HIDDEN_SIZE)).backward()

    return step


def _optimizer(modules: Iterable[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-3)


def _make_stages(
    schedule: Schedule, stages_per_rank: int, work: Work, log: list[Leg]
) -> tuple[tuple[int, ...], dict[int, EmulatedStage]]:
    """The rank of each stage, and this rank's stages."""
    placement = rank_of_stage(schedule, work.num_ranks, stages_per_rank)
    mine = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank()]
    return placement, {stage: EmulatedStage(stage, work.leg_seconds / stages_per_rank, log) for stage in mine}


def _rows(runtime: str, build: Callable[[Schedule, int, Work, list[Leg]], Step]) -> list[Contender]:
    rows = [
        (Schedule.gpipe, 1, False),
        (ONE_F_ONE_B, 1, False),
        (Schedule.interleaved_1f1b, 2, False),
        (Schedule.interleaved_zero_bubble, 1, True),
        (Schedule.interleaved_zero_bubble, 2, True),
        (Schedule.zbv, 2, True),
        (Schedule.dualpipev, 2, True),
    ]
    return [
        Contender(runtime, NAMES[schedule], stages_per_rank, splits, partial(build, schedule, stages_per_rank))
        for schedule, stages_per_rank, splits in rows
    ]


CONTENDERS = (
    Contender("DeepSpeed", "1F1B", 1, False, build_deepspeed),
    *_rows("torch", build_torch),
    *_rows("hfdist", build_hfdist),
    Contender("none", "legs of one rank", 2, False, build_alone),
)
