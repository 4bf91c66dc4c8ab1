"""Choices of a pipeline: its schedule, and by what its stages are balanced."""

from __future__ import annotations

from enum import Enum

Schedule = Enum(
    "Schedule",
    {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved_1f1b": "interleaved_1f1b",
        "interleaved_zero_bubble": "interleaved_zero_bubble",
        "zbv": "zbv",
        "dualpipev": "dualpipev",
    },
)
"""Schedules of torch.distributed.pipelining. Made by a call, since `1f1b` cannot be written as an attribute."""

ONE_F_ONE_B = Schedule["1f1b"]


class Balance(Enum):
    """What is made equal over the ranks of a pipeline."""

    parameters = "parameters"
    flops = "flops"
    measured = "measured"
