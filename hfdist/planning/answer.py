"""Answers what `hfdist plan` is asked: one layout, the best of all, or the fewest processes. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hfdist.planning.advice import advise
from hfdist.planning.calibrate_here import run_steps
from hfdist.planning.describe import describe_plan
from hfdist.planning.machines import find_machines
from hfdist.planning.make_plan import find_planned_architecture, make_plan
from hfdist.planning.request import PlanRequest
from hfdist.planning.searching.evaluate import Candidate, Machines
from hfdist.planning.searching.search import fewest_processes, search
from hfdist.units import duration, share, short, size


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is printed."""

    text: str
    content: Any
    """The same as JSON."""
    fits: bool


def answer(request: PlanRequest) -> Answer:
    """Plan.

    Raises:
        ConfigError: as the run itself would, before its first step.
        ResourceError: the run fits on no number of processes, or the steps that calibrate have failed.
    """
    config, asked = request.config, request.plan
    processes = request.processes or 1
    if asked.calibrate:
        run_steps(request.line, processes)
    machines = find_machines(config, asked, request.hardware, processes)
    architecture = find_planned_architecture(config)
    if request.processes is None:
        fewest = fewest_processes(config, architecture, machines, searches=asked.search)
        return _answer_candidates(request, machines, [fewest])
    if asked.search:
        found = search(config, architecture, machines, processes=processes, best=asked.best)
        return _answer_candidates(request, machines, found.candidates)
    plan = make_plan(config, machines, processes, architecture)
    plan = replace(plan, advice=advise(plan, config, architecture, machines))
    return Answer(text=describe_plan(plan), content=plan.to_json(), fits=plan.fits)


def _answer_candidates(request: PlanRequest, machines: Machines, found: Sequence[Candidate]) -> Answer:
    content = [_to_json(one, request) for one in found]
    return Answer(text=_describe(request, machines, found), content=content, fits=bool(found))


def _describe(request: PlanRequest, machines: Machines, found: Sequence[Candidate]) -> str:
    usable, hardware = size(machines.usable_bytes), machines.hardware.name
    if not found:
        return f"no layout fits: {request.processes} x {hardware}, {usable} each"
    processes = found[0].layout.world_size
    num_traced = sum(one.is_traced for one in found)
    head = f"the best layouts on {processes} x {hardware}, {usable} each; memory and time by formulas"
    head += f", of {num_traced} by traces" if num_traced else ""
    if request.processes is None:
        head = f"the fewest that fit: {processes} x {hardware}, {usable} each"
    rows: list[tuple[str, ...]] = [("", "a step", "tokens a second", "MFU", "memory", "layout")]
    rows += [(f"{number}", *_row(one, request)) for number, one in enumerate(found, 1)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_align(row, widths) for row in rows]
    command = " ".join(["hfdist", request.line.recipe, *request.line.recipe_arguments])
    lines += ["", f"what each adds to `{command}`:"]
    lines += [f"  {number}  {' '.join(one.overrides) or '(as it is)'}" for number, one in enumerate(found, 1)]
    lines += ["", "`hfdist plan` with such a line traces the layout, and says where its memory and its time go"]
    return "\n".join([head, "", *lines])


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    *figures, layout = row
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(figures, widths, strict=False)) + f"  {layout}"


def _row(one: Candidate, request: PlanRequest) -> tuple[str, ...]:
    layout, seconds = one.layout, one.time.seconds
    recompute = "" if layout.recompute is None else f", recompute {layout.recompute.value}"
    schedule = f", {layout.schedule.value} of {layout.stages_per_rank} stages a rank" if layout.pipeline > 1 else ""
    offload = ", offload" if layout.offload.value != "none" else ""
    words = f"{layout.describe().partition(': ')[2] or 'one process'}; {layout.sharding.value}"
    micro = f", micro batch {layout.micro_batch_size}"
    return (
        duration(seconds),
        short(_tokens(request) / seconds),
        "" if one.mfu is None else share(one.mfu),
        size(one.memory.use.total),
        f"{words}{micro}{recompute}{schedule}{offload}",
    )


def _tokens(request: PlanRequest) -> int:
    return request.config.train.global_batch_size * request.config.data.sequence_length


def _to_json(one: Candidate, request: PlanRequest) -> dict[str, object]:
    return {
        "processes": one.layout.world_size,
        "layout": one.layout.degrees | {"sharding": one.layout.sharding.value},
        "overrides": list(one.overrides),
        "step_seconds": one.time.seconds,
        "tokens_per_second": _tokens(request) / one.time.seconds,
        "mfu": one.mfu,
        "memory": asdict(one.memory.use) | {"total": one.memory.use.total, "rank": one.memory.rank},
        "sent_bytes": {sent.axis: sent.sent_bytes for sent in one.traffic},
    }
