"""Answers what `hfdist plan` is asked: one layout, the best of all, or the fewest processes. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfdist.planning.advise import advise
from hfdist.planning.calibration_steps import run_steps
from hfdist.planning.candidates import candidate_to_json, describe_candidates
from hfdist.planning.describe import describe_plan
from hfdist.planning.machines import find_machines
from hfdist.planning.make_plan import make_plan
from hfdist.planning.not_counted import not_counted
from hfdist.planning.planned_architecture import find_planned_architecture
from hfdist.planning.request import PlanRequest
from hfdist.planning.searching.evaluate import Candidate, Machines
from hfdist.planning.searching.fewest import fewest_processes
from hfdist.planning.searching.search import search


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of `hfdist plan`, as text and as JSON values."""

    text: str
    content: object
    """JSON values of the same."""
    fits: bool


def answer(request: PlanRequest) -> Answer:
    """Answer a request.

    Raises:
        ConfigError: as the run itself would, before its first step.
        ResourceError: the run fits on no number of processes, or the steps that calibrate have failed.
    """
    config, asked = request.config, request.plan
    processes = request.processes or 1
    if asked.calibrate:
        run_steps(request.line, processes)
    machines = find_machines(config, asked, request.hardware, processes)
    architecture = find_planned_architecture(config, machines.hardware.device_type)
    note = not_counted(config, architecture)
    if request.processes is None:
        fewest = fewest_processes(config, architecture, machines, searches=asked.search)
        return _answer_candidates(request, machines, [fewest], note)
    if asked.search:
        found = search(config, architecture, machines, processes=processes, best=asked.best)
        return _answer_candidates(request, machines, found.candidates, note)
    plan = make_plan(config, machines, processes, architecture)
    plan = replace(plan, advice=advise(plan, config, architecture, machines))
    return Answer(text=describe_plan(plan), content=plan.to_json(), fits=plan.fits)


def _answer_candidates(request: PlanRequest, machines: Machines, found: Sequence[Candidate], note: str) -> Answer:
    content = [candidate_to_json(one) | {"not_counted": note} for one in found]
    text = "\n\n".join(part for part in (describe_candidates(request, machines, found), note) if part)
    return Answer(text=text, content=content, fits=bool(found))
