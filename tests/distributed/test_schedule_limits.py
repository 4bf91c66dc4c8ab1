"""The check of micro batches accepts exactly those that torch's schedules run to the end with right gradients."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.errors import ConfigError
from hfdist.pipeline.schedule import check_microbatches, rank_of_stage
from hfdist.testing import run_ranks
from tests.unit.pipeline.torch_actions import build

pytestmark = pytest.mark.distributed

NUM_RANKS = 2
NUMBERS = range(1, 9)
KINDS = [(Schedule.gpipe, 1), (ONE_F_ONE_B, 1), (Schedule.interleaved_1f1b, 2), (Schedule.interleaved_1f1b, 3),
         (Schedule.interleaved_zero_bubble, 1), (Schedule.interleaved_zero_bubble, 2), (Schedule.zbv, 2),
         (Schedule.dualpipev, 2)]  # fmt: skip


def make_stages(num_stages, num_microbatches):
    """Tiny stages, input and target, the same on all ranks; gradients are those of one process."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_stages)]
    inputs, targets = torch.randn(2, 2 * num_microbatches, 4).unbind()
    sum_of_squares(nn.Sequential(*stages)(inputs), targets).backward()
    return stages, inputs, targets


def sum_of_squares(output, target):
    return (output - target).square().sum()


def worst_difference(schedule, per_rank, num_microbatches):
    """Of gradients from those of one process, on this rank, relative; None: torch refused at construction."""
    placement = rank_of_stage(schedule, NUM_RANKS, per_rank)
    rank, last = int(os.environ["RANK"]), len(placement) - 1
    modules, inputs, targets = make_stages(len(placement), num_microbatches)
    mine = [stage for stage in range(len(placement)) if placement[stage] == rank]
    wanted = [p.grad for stage in mine for p in modules[stage].parameters()]
    for module in modules:
        module.zero_grad(set_to_none=True)
    stages = [PipelineStage(modules[stage], stage, len(placement), torch.device("cpu")) for stage in mine]
    try:
        pipeline = build(schedule, stages, num_microbatches, loss_fn=sum_of_squares, scale_grads=False)
    except ValueError:
        return None
    pipeline.step(*[inputs] * (0 in mine), **{"target": targets} if last in mine else {})
    got = [p.grad for stage in mine for p in modules[stage].parameters()]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))


def run_all():
    return {kind: [worst_difference(*kind, number) for number in NUMBERS] for kind in KINDS}


def accepts(schedule, per_rank, num_microbatches):
    try:
        check_microbatches(
            schedule,
            num_ranks=NUM_RANKS,
            stages_per_rank=per_rank,
            num_microbatches=num_microbatches,
            micro_batch_size=2,
            data_size=1,
        )
    except ConfigError:
        return False
    return True


def test_torch_runs_exactly_what_is_accepted():
    for found in run_ranks(run_all, NUM_RANKS):
        for kind, differences in found.items():
            ran = {number for number, worst in zip(NUMBERS, differences, strict=True) if worst is not None}
            assert ran == {number for number in NUMBERS if accepts(*kind, number)}, kind
            assert ran, kind
            assert max(worst for worst in differences if worst is not None) < 1e-5, kind
