"""Layouts that a search has found, as a table for people and as JSON values."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from hfdist.config.layout import Layout
from hfdist.planning.costs import bytes_by_axis
from hfdist.planning.request import PlanRequest
from hfdist.planning.searching.evaluate import Candidate, Machines
from hfdist.units import duration, share, short, size


def describe_candidates(request: PlanRequest, machines: Machines, found: Sequence[Candidate]) -> str:
    """Give the table, the best first, with what each layout adds to the command; or that none fits."""
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
    rows += [(f"{number}", *_row(one)) for number, one in enumerate(found, 1)]
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


def _row(one: Candidate) -> tuple[str, ...]:
    seconds = one.time.seconds
    return (
        duration(seconds),
        short(one.tokens_per_step / seconds),
        "" if one.mfu is None else share(one.mfu),
        size(one.memory.use.total),
        describe_layout(one.layout),
    )


def describe_layout(layout: Layout) -> str:
    """Give a layout in words, with its micro batches, and what is computed again."""
    recompute = "" if layout.recompute is None else f", recompute {layout.recompute.value}"
    schedule = f", {layout.schedule.value} of {layout.stages_per_rank} stages a rank" if layout.pipeline > 1 else ""
    offload = ", offload" if layout.offload.value != "none" else ""
    sequence = ", tokens shared" if layout.sequence else ""
    words = f"{layout.describe().partition(': ')[2] or 'one process'}{sequence}; {layout.sharding.value}"
    return f"{words}, micro batch {layout.micro_batch_size}{recompute}{schedule}{offload}"


def candidate_to_json(one: Candidate) -> dict[str, object]:
    """Give what `--json` prints of a layout."""
    return {
        "processes": one.layout.world_size,
        "layout": one.layout.degrees | {"sequence": one.layout.sequence, "sharding": one.layout.sharding.value},
        "overrides": list(one.overrides),
        "step_seconds": one.time.seconds,
        "tokens_per_second": one.tokens_per_step / one.time.seconds,
        "mfu": one.mfu,
        "memory": asdict(one.memory.use) | {"total": one.memory.use.total, "rank": one.memory.rank},
        "sent_bytes": bytes_by_axis(one.traffic),
    }
