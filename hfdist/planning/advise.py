"""The one change of a layout that makes a run fit, or makes it fastest, of all that differ in one thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from transformers import PreTrainedConfig

from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Sharding
from hfdist.config.train import Recompute
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.plan import Plan
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.layout_space import passes_checks
from hfdist.planning.searching.search import measure
from hfdist.topology import OWN_AXES
from hfdist.units import duration, size

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
