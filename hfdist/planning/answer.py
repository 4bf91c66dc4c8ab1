"""Answers what `hfdist plan` is asked: one layout, the best of all, or the fewest processes. Loads torch."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf

from transformers import PreTrainedConfig

from hfdist.config.cli.about_run import LineAboutRun
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Sharding
from hfdist.config.train import Recompute
from hfdist.errors import ResourceError
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.costs import bytes_by_axis
from hfdist.planning.describe import describe_plan
from hfdist.planning.machines import find_machines
from hfdist.planning.make_plan import find_planned_architecture, make_plan
from hfdist.planning.plan import Plan
from hfdist.planning.request import PlanRequest
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.layout_space import passes_checks
from hfdist.planning.searching.search import fewest_processes, measure, search
from hfdist.processes.child_python import module
from hfdist.topology import OWN_AXES
from hfdist.units import duration, share, short, size


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
    command = shlex.join(["hfdist", request.line.recipe, *request.line.recipe_arguments])
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
    sequence = ", tokens shared" if layout.sequence else ""
    words = f"{layout.describe().partition(': ')[2] or 'one process'}{sequence}; {layout.sharding.value}"
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
        "layout": one.layout.degrees | {"sequence": one.layout.sequence, "sharding": one.layout.sharding.value},
        "overrides": list(one.overrides),
        "step_seconds": one.time.seconds,
        "tokens_per_second": _tokens(request) / one.time.seconds,
        "mfu": one.mfu,
        "memory": asdict(one.memory.use) | {"total": one.memory.use.total, "rank": one.memory.rank},
        "sent_bytes": bytes_by_axis(one.traffic),
    }


_STEPS = (
    "train.max_steps=7",
    "train.epochs=null",
    "train.eval_every=null",
    "train.max_hours=null",
    "train.max_cost=null",
    "train.max_kwh=null",
    "train.deadline=null",
    "optimizer.warmup_steps=0",
    "optimizer.warmup_tokens=null",
    "optimizer.warmup_fraction=null",
    "data.eval_sequences=1",
    "checkpoint.every=null",
    "checkpoint.keep_best=false",
    "checkpoint.replicate_every=null",
    "checkpoint.mirror=null",
    "checkpoint.resume=auto",
    "evaluate.at_start=false",
    "evaluate.patience=null",
    "evaluate.min_delta=0",
    "evaluate.export=last",
    "evaluate.lm_eval=[]",
    "evaluate.lm_eval_include=null",
    "report.to=[]",
    "report.progress=false",
    "report.plot=false",
    "report.plan=true",
    "report.sample_tokens=0",
    "export.push_to=null",
)
"""Seven steps, of which two also warm up. What needs saves, evaluations or more steps is off."""


def run_steps(line: LineAboutRun, processes: int) -> None:
    """Run `_STEPS`, which later plans learn from; ResourceError: they failed."""
    with tempfile.TemporaryDirectory(prefix="hfdist-plan-") as folder:
        own = (*_STEPS, f"run.dir={folder}", f"launch.processes={processes}")
        command = module("hfdist", line.recipe, *line.recipe_arguments, *own)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        what = "the steps that were to calibrate the plan have failed"
        found = tuple(ended.stderr.strip().splitlines()[-6:])
        hint = "plan.calibrate=false plans without them"
        raise ResourceError(what, where="plan.calibrate", found=found, hint=hint)


_WORTH = 0.95
"""A step of a neighbour must be shorter than this share of the asked layout's."""


def advise(plan: Plan, config: RunConfig, architecture: PreTrainedConfig, machines: Machines) -> str | None:
    """Give the overrides of the one change that makes a run fit, or fastest, with its figures; None: there is none.

    Args:
        plan: plan of the run as it is asked.
        config: config of the run.
        architecture: config of the model.
        machines: see `find_machines`.
    """
    model = measure(config, architecture, machines, processes=plan.processes, as_asked=True)
    evaluator = Evaluator(config, model, machines)
    strategy = config.strategy
    per_rank = stages_per_rank(strategy.schedule, strategy.stages_per_rank) if strategy.pipeline > 1 else 1
    asked = Layout.of(config, plan.processes, per_rank)
    found = [one for layout in _neighbours(asked) if (one := _evaluate(evaluator, layout)) is not None]
    if not found:
        return None
    best = min(found, key=lambda one: one.time.seconds)
    # Formulas are compared with formulas, also where by these it does not fit.
    as_asked = _evaluate(Evaluator(config, model, replace(machines, usable_bytes=inf)), asked)
    before = plan.time.seconds if as_asked is None else as_asked.time.seconds
    if plan.fits and best.time.seconds > _WORTH * before:
        return None
    words = f"about {duration(best.time.seconds)} a step in place of {duration(before)}"
    return f"{' '.join(best.overrides)}: {words}, and {size(best.memory.use.total)}"


def _evaluate(evaluator: Evaluator, layout: Layout) -> Candidate | None:
    return evaluator.evaluate(layout) if passes_checks(layout.apply(evaluator.config)) else None


def _neighbours(layout: Layout) -> Iterator[Layout]:
    """Give the layouts on as many processes that differ in one thing."""
    for recompute in (None, *Recompute):
        if recompute is not layout.recompute:
            yield replace(layout, recompute=recompute)
    for sharding in Sharding:
        if sharding is not layout.sharding and layout.data > 1:
            yield replace(layout, sharding=sharding)
    if layout.offload is Offload.none:
        yield replace(layout, offload=Offload.cpu)
    if layout.tensor > 1:
        yield replace(layout, sequence=not layout.sequence)
    sequences = layout.micro_batch_size * layout.num_microbatches
    for micro in (2 * layout.micro_batch_size, layout.micro_batch_size // 2):
        if micro and sequences % micro == 0:
            yield replace(layout, micro_batch_size=micro, num_microbatches=sequences // micro)
    for axis in OWN_AXES:
        degree = getattr(layout, axis)
        # Each of twice as many data ranks has half of the sequences, and the other way round.
        if layout.data % 2 == 0:
            fewer = {axis: 2 * degree, "data": layout.data // 2, "num_microbatches": 2 * layout.num_microbatches}
            yield replace(layout, **fewer)
        if degree % 2 == 0 and layout.num_microbatches % 2 == 0:
            more = {axis: degree // 2, "data": 2 * layout.data, "num_microbatches": layout.num_microbatches // 2}
            yield replace(layout, **more)
