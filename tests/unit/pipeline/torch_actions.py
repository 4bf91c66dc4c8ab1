"""The orders in which ranks work, timed with forwards and both halves of backwards equally long."""

from types import SimpleNamespace

import torch
from torch.distributed.pipelining import schedules

from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.pipeline.instructions import list_instructions
from hfdist.pipeline.schedule import rank_of_stage

CLASSES = {
    Schedule.gpipe: schedules.ScheduleGPipe,
    ONE_F_ONE_B: schedules.Schedule1F1B,
    Schedule.interleaved_1f1b: schedules.ScheduleInterleaved1F1B,
    Schedule.interleaved_zero_bubble: schedules.ScheduleInterleavedZeroBubble,
    Schedule.zbv: schedules.ScheduleZBVZeroBubble,
    Schedule.dualpipev: schedules.ScheduleDualPipeV,
}
KINDS = [
    (Schedule.gpipe, 1), (ONE_F_ONE_B, 1), (Schedule.interleaved_1f1b, 2), (Schedule.interleaved_1f1b, 3),
    (Schedule.interleaved_zero_bubble, 1), (Schedule.interleaved_zero_bubble, 2), (Schedule.zbv, 2),
    (Schedule.dualpipev, 2),
]  # fmt: skip
SINGLE = (Schedule.gpipe, ONE_F_ONE_B)
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
GIVES = {"F": "output", "I": "gradient", "W": "weights", "B": "gradient"}


def build(schedule, stages, num_microbatches, **options):
    """torch's own schedule, or its ValueError."""
    return CLASSES[schedule](stages[0] if schedule in SINGLE else stages, num_microbatches, **options)


def order(schedule, num_ranks, stages_per_rank, num_microbatches):
    """What each rank computes, in order: (letter, stage, micro batch). Raises torch's ValueError."""
    placement = rank_of_stage(schedule, num_ranks, stages_per_rank)
    # torch plans all ranks on each; of its stages it needs no more than their places for that.
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=len(placement), group_size=num_ranks, group_rank=0, submod=torch.nn.Identity()
        )
        for index, rank in enumerate(placement)
        if rank == 0
    ]
    build(schedule, stages, num_microbatches)
    return [
        [(each.operation.value, each.stage, each.microbatch) for each in own if each.operation.value in UNITS]
        for own in list_instructions(schedule, placement, num_microbatches)
    ]


def run(ranks, num_stages):
    """Start and stop of all actions: [(rank, letter, stage, microbatch, start, stop)], in forwards of one stage."""
    free, reached, done, events = [0] * len(ranks), [0] * len(ranks), {}, []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            while reached[rank] < len(actions):
                letter, stage, microbatch = actions[reached[rank]]
                inputs = _inputs(letter, stage, microbatch, num_stages)
                if not all(name in done for name in inputs):
                    break
                start = max([free[rank], *(done[name] for name in inputs)])
                free[rank] = start + UNITS[letter]
                events.append((rank, letter, stage, microbatch, start, free[rank]))
                done[GIVES[letter], stage, microbatch] = free[rank]
                reached[rank] += 1
                progress = True
    assert reached == [len(actions) for actions in ranks], "the schedule stands still"
    return events


def _inputs(letter, stage, microbatch, num_stages):
    """What must be done before, on this rank or another."""
    if letter == "F":
        return [("output", stage - 1, microbatch)] if stage > 0 else []
    if letter == "W":
        return []
    return [("gradient", stage + 1, microbatch)] if stage < num_stages - 1 else [("output", stage, microbatch)]
