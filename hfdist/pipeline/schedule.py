"""The schedules of a pipeline: what each asks for, and how long its ranks are idle. Their orders: instructions.py."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import NamedTuple

from hfdist.config.layout import Layout
from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.errors import ConfigError


class _Limit(Enum):
    """Which numbers of micro batches torch's schedule runs, in words."""

    none = "any number"
    stages = "at least {stages} micro batches, one for each stage"
    rounds = (
        "micro batches that divide evenly into as many rounds as there are whole {ranks}s in them, "
        "such as any multiple of {ranks}"
    )


class _Traits(NamedTuple):
    """What tells one schedule from another."""

    default: int
    """Stages on each rank, where none are asked for."""
    fewest: int
    most: int | None
    idle: int
    """Idle time of a rank for each further rank, in forwards of one stage: see `bubble_fraction`."""
    limit: _Limit


_TRAITS = {
    Schedule.gpipe: _Traits(default=1, fewest=1, most=1, idle=3, limit=_Limit.none),
    ONE_F_ONE_B: _Traits(default=1, fewest=1, most=1, idle=3, limit=_Limit.stages),
    Schedule.interleaved_1f1b: _Traits(default=2, fewest=2, most=None, idle=3, limit=_Limit.rounds),
    Schedule.interleaved_zero_bubble: _Traits(default=2, fewest=1, most=None, idle=1, limit=_Limit.rounds),
    Schedule.zbv: _Traits(default=2, fewest=2, most=2, idle=1, limit=_Limit.none),
    Schedule.dualpipev: _Traits(default=2, fewest=2, most=2, idle=1, limit=_Limit.stages),
    # Until blocks are timed, and in plans.
    Schedule.auto: _Traits(default=1, fewest=1, most=1, idle=3, limit=_Limit.none),
}
"""What is known of each schedule."""


def stages_per_rank(schedule: Schedule, asked: int | None) -> int:
    """Give the number of stages on each rank; `asked=None`: what the schedule is usually run with.

    Raises:
        ConfigError: the schedule cannot run with so many.
    """
    traits = _TRAITS[schedule]
    if asked is None:
        return traits.default
    if asked < traits.fewest or (traits.most is not None and asked > traits.most):
        raise ConfigError(
            f"the {schedule.value} schedule does not run with {asked} stages on each rank",
            where="strategy.stages_per_rank",
            found=asked,
            allowed=f"{traits.fewest}{' or more' if traits.most is None else ''}",
            hint=f"strategy.stages_per_rank={traits.default}, or another strategy.schedule",
        )
    return asked


def rank_of_stage(schedule: Schedule, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Give the pipeline rank of each stage: round and round, or once there and back for the V-shaped schedules."""
    loop = tuple(range(num_ranks))
    return loop + loop[::-1] if schedule in (Schedule.zbv, Schedule.dualpipev) else loop * stages_per_rank


def check_microbatches(
    schedule: Schedule,
    *,
    num_ranks: int,
    stages_per_rank: int,
    num_microbatches: int,
    micro_batch_size: int,
    data_size: int,
) -> None:
    """Check the number of micro batches of one data rank in a step against the schedule's own limit.

    Raises:
        ConfigError: the schedule cannot run so many; the message proposes the nearest number that it can.
    """
    num_stages = num_ranks * stages_per_rank
    fits = partial(runs_microbatches, schedule, num_ranks, stages_per_rank)

    if fits(num_microbatches):
        return
    # Above it lie the number of stages, if that is the limit, and a multiple of the number of ranks.
    near = _nearest(num_microbatches, filter(fits, range(1, num_microbatches + num_stages + 1)))
    hint = f"train.global_batch_size={near * micro_batch_size * data_size} train.micro_batch_size={micro_batch_size}"
    hint += f" ({near} micro batches)"
    share = num_microbatches * micro_batch_size
    same_batch = [number for number in range(1, share + 1) if share % number == 0 and fits(number)]
    if same_batch:
        same = _nearest(num_microbatches, same_batch)
        hint += f", or train.micro_batch_size={share // same} ({same} micro batches of the same global batch)"
    raise ConfigError(
        f"the {schedule.value} schedule cannot run {num_microbatches} micro batches on {num_ranks} pipeline ranks",
        where="train.global_batch_size",
        found=f"{share * data_size}: {num_microbatches} micro batches of {micro_batch_size} sequences, "
        f"on each of {data_size} data ranks",
        allowed=_TRAITS[schedule].limit.value.format(ranks=num_ranks, stages=num_stages) + f"; nearest: {near}",
        hint=hint,
    )


def bubble_fraction(schedule: Schedule, *, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> float:
    """Give the share of a step, from barrier to barrier, in which a rank is idle, from 0 to 1.

    For stages that all take as long, with forward F, input gradient B and weight gradient W of equal length, and with
    p ranks, v stages each and m micro batches, a step lasts 3 m v + idle, in forwards of one stage, where idle is

        gpipe                       3 (p - 1)     Huang et al. 2019, arXiv:1811.06965: (p - 1) / (m + p - 1)
        1f1b                        3 (p - 1)     Narayanan et al. 2021, arXiv:2104.04473: (p - 1) (F + B + W)
        interleaved_1f1b            3 (p - 1)     the same, divided by v in units of a rank's forward
        interleaved_zero_bubble     (p - 1)       Qi et al. 2024, arXiv:2401.10241, ZB-H1: (p - 1) (F + B - W)
        zbv                         (p - 1)       the same, section 6: none but the wait for the first forward
        dualpipev                   (p - 1)       deepseek-ai/DualPipe, with a forward and a backward one after the
                                                  other where theirs run at once

    Papers leave out the wait for the first forward where the optimizer's steps of ranks need not line up. Here they
    do: gradients are clipped by a norm over all ranks. No schedule can idle less than (p - 1): the last rank waits that
    long for its first input. With fewer micro batches than ranks (zbv: than 3/2 p) a rank idles longer than this.
    """
    idle = _TRAITS[schedule].idle * (num_ranks - 1)
    return idle / (3 * num_microbatches * stages_per_rank + idle)


def split_share(schedule: Schedule, num_ranks: int, num_microbatches: int) -> float:
    """Give the share of backwards that run in two halves, about."""
    match schedule:
        case Schedule.interleaved_zero_bubble | Schedule.zbv:
            return 1.0
        case Schedule.dualpipev:
            # At the ends of a step.
            return min(1.0, num_ranks / (2 * num_microbatches))
    return 0.0


def live_microbatches(layout: Layout, rank: int) -> int:
    """Give the most micro batches whose activations a rank holds at a time, counted once for each stage."""
    ranks, per_rank = layout.pipeline, layout.stages_per_rank
    most = layout.num_microbatches * per_rank
    match layout.schedule:
        case Schedule.gpipe:
            return most
        case schedule if schedule in (ONE_F_ONE_B, Schedule.auto):
            return min(most, ranks - rank)
        case Schedule.interleaved_1f1b:
            return min(most, 2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1)
        case Schedule.dualpipev:
            return min(most, 2 * ranks + 1)
    return min(most, ranks * per_rank)


def runs_microbatches(schedule: Schedule, num_ranks: int, stages_per_rank: int, number: int) -> bool:
    """Whether a schedule runs so many micro batches of one data rank in a step."""
    match _TRAITS[schedule].limit:
        case _Limit.none:
            return True
        case _Limit.stages:
            return number >= num_ranks * stages_per_rank
        case _Limit.rounds:
            return number % max(1, number // num_ranks) == 0


def _nearest(number: int, candidates: Iterable[int]) -> int:
    """Give the candidate nearest to the number, the larger of two."""
    return min(candidates, key=lambda candidate: (abs(candidate - number), -candidate))
