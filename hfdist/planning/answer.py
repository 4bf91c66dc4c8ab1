"""Answers what `hfdist plan` is asked: one layout, the best of all, or the fewest processes. Loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfdist.planning.command import PlanRequest
from hfdist.planning.describe import describe_plan
from hfdist.planning.machines import find_machines
from hfdist.planning.make_plan import make_plan


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is printed."""

    text: str
    content: Any
    """The same as JSON."""
    fits: bool


def answer(request: PlanRequest) -> Answer:
    """Plan; ConfigError: as the run itself would, before its first step."""
    processes = request.processes or 1
    machines = find_machines(request.config, request.plan, request.hardware, processes)
    plan = make_plan(request.config, machines, processes)
    return Answer(text=describe_plan(plan), content=plan.to_json(), fits=plan.fits)
