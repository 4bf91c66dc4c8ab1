"""Where a step's time goes: the chain of legs that decides its end, and the gaps between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from benchmarks.emulated import Durations, Leg

Key = tuple[int, str, int]


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step along its critical path; they sum to the step's length.

    `wanted` is what the legs should take, `overslept` what they took longer; `local` is spent between two legs of one
    rank, `crossing` between the end of a leg and the start of one on another rank that needs it (both are Python,
    autograd and communication); `edges` is before the first leg and after the last one.
    """

    wanted_seconds: float
    overslept_seconds: float
    local_seconds: float
    crossing_seconds: float
    edges_seconds: float
    num_legs: int
    num_crossings: int


def break_down(logs: list[list[Leg]], durations: Durations, start_seconds: float, end_seconds: float) -> Breakdown:
    """Walk back from the last leg to the first, each time to whatever the leg waited for last.

    Args:
        logs: every rank's legs of one step, in the order they ran; each stage takes micro batches in order.
        durations: what the legs of one stage should take.
        start_seconds: when the first rank began the step.
        end_seconds: when the last rank ended it.

    Returns:
        The seconds by cause.
    """
    legs, before, rank_of = _index(logs)
    last_stage = max(stage for stage, _, _ in legs)
    key = max(legs, key=lambda each: legs[each].end_seconds)
    edges = end_seconds - legs[key].end_seconds
    wanted = overslept = local = crossing = 0.0
    num_legs = num_crossings = 0
    while True:
        leg = legs[key]
        wanted += durations.of(leg.kind)
        overslept += leg.end_seconds - leg.start_seconds - durations.of(leg.kind)
        num_legs += 1
        causes = [each for each in (before.get(key), _needed(key, legs, last_stage)) if each in legs]
        if not causes:
            break
        cause = max(causes, key=lambda each: legs[each].end_seconds)
        gap = leg.start_seconds - legs[cause].end_seconds
        if rank_of[cause] == rank_of[key]:
            local += gap
        else:
            crossing += gap
            num_crossings += 1
        key = cause
    edges += legs[key].start_seconds - start_seconds
    return Breakdown(wanted, overslept, local, crossing, edges, num_legs, num_crossings)


def _index(logs: list[list[Leg]]) -> tuple[dict[Key, Leg], dict[Key, Key], dict[Key, int]]:
    legs: dict[Key, Leg] = {}
    before: dict[Key, Key] = {}
    rank_of: dict[Key, int] = {}
    for rank, log in enumerate(logs):
        seen: Counter[tuple[int, str]] = Counter()
        previous: Key | None = None
        for leg in log:
            key = (leg.stage, leg.kind, seen[leg.stage, leg.kind])
            seen[leg.stage, leg.kind] += 1
            legs[key], rank_of[key] = leg, rank
            if previous is not None:
                before[key] = previous
            previous = key
    return legs, before, rank_of


def _needed(key: Key, legs: dict[Key, Leg], last_stage: int) -> Key | None:
    """The leg of a neighbouring stage whose result this leg takes."""
    stage, kind, microbatch = key
    if kind == "F":
        return (stage - 1, "F", microbatch)
    # Where both gradients run in one backward, the weight's comes first and is the one that waits.
    together = legs[key].start_seconds <= legs[stage, "I", microbatch].start_seconds
    return (stage + 1, "I", microbatch) if together and stage < last_stage else None
