"""A plan in words: the page that `hfdist plan` prints, and the two lines with which a run starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from hfdist.planning.costs import AxisTraffic
from hfdist.planning.island_traffic import IslandTraffic
from hfdist.planning.plan import Plan
from hfdist.strategies.step_memory import MemoryUse
from hfdist.units import SECONDS_PER_HOUR, count, duration, energy, money, share, short, size


def describe_plan(plan: Plan) -> str:
    """Give the page of a plan, with the verdict first."""
    lines = [
        verdict(plan),
        f"{plan.layout}, on {plan.processes} x {plan.hardware}",
        *([f"adapter: {plan.adapter}"] if plan.adapter else []),
        "",
        f"memory of rank {plan.memory.rank}, which holds most, in the {plan.memory.phase.value}"
        f"{'' if plan.is_traced else ', by formulas'}",
        *_memory_rows(plan),
        "",
        f"a step of {plan.tokens_per_step:,} tokens and {plan.flops_per_step:.3g} FLOPs, {_basis(plan)}",
        *_time_rows(plan),
    ]
    if plan.traffic:
        lines += ["", "what a rank sends in a step", *_table(_traffic_rows(plan))]
    if plan.islands is not None:
        lines += ["", _head_of_islands(plan.islands), *_table(_island_rows(plan.islands))]
    lines += ["", *_table(_run_rows(plan))]
    lines += ["", plan.not_counted] if plan.not_counted else []
    return "\n".join(line.rstrip() for line in lines)


def verdict(plan: Plan) -> str:
    """Say in one line whether a plan fits."""
    needed, usable = size(plan.memory.use.total), size(plan.usable_bytes)
    if not plan.fits:
        return f"does not fit: a rank needs {needed}, and may use {usable}"
    tight = plan.memory.high_bytes > plan.usable_bytes
    return f"fits{', barely' if tight else ''}: a rank needs {needed} of {usable}"


def describe_shortly(plan: Plan) -> str:
    """Describe memory and time of a plan for the start of its run."""
    parts = ", ".join(f"{name} {size(value)}" for name, value in uses(plan.memory.use) if value > 0)
    low, high = size(plan.memory.low_bytes), size(plan.memory.high_bytes)
    memory_range = "" if low == high else f" ({low} to {high})"
    in_all = "" if plan.hours is None else f", {duration(plan.hours * SECONDS_PER_HOUR)} in all"
    in_all += "" if plan.hours is None or plan.cost is None else f" for {money(plan.cost, plan.currency)}"
    return (
        f"{size(plan.memory.use.total)} on rank {plan.memory.rank}{memory_range}: {parts}; "
        f"{duration(plan.time.seconds)} a step{in_all}{'. ' if plan.not_counted else ''}{plan.not_counted}"
    )


def uses(use: MemoryUse) -> list[tuple[str, float]]:
    """Give the parts of memory by name, in bytes."""
    return [(one.name, getattr(use, one.name)) for one in fields(use)]


def describe_whole_run(plan: Plan) -> str:
    """Describe time, money and energy of the whole run, as far as they are known."""
    hours = plan.hours
    if hours is None or plan.max_steps is None:
        return "its steps are counted by its data: not known here"
    parts = [f"{plan.max_steps:,} steps", duration(hours * SECONDS_PER_HOUR)]
    parts += [] if plan.cost is None else [money(plan.cost, plan.currency)]
    parts += [] if plan.kwh is None else [energy(plan.kwh)]
    return ", ".join(parts)


def _basis(plan: Plan) -> str:
    if plan.timed_runs:
        return f"corrected by {count(plan.timed_runs, 'past run')} on such hardware"
    return "by the limits of the hardware"


def _memory_rows(plan: Plan) -> Iterator[str]:
    rows = [(name, size(value), "") for name, value in uses(plan.memory.use)]
    of = (
        f"of {size(plan.usable_bytes)} usable; between {size(plan.memory.low_bytes)} and {size(plan.memory.high_bytes)}"
    )
    return _table([*rows, ("total", size(plan.memory.use.total), of)])


def _time_rows(plan: Plan) -> Iterator[str]:
    time = plan.time
    parts = {"compute": time.compute, "bubble": time.bubble}
    parts |= {f"waits for {axis}": seconds for axis, seconds in time.exposed.items()}
    rows = [(name, duration(seconds), share(seconds / time.seconds)) for name, seconds in parts.items() if seconds > 0]
    rows.append(("total", duration(time.seconds), f"between {duration(time.low)} and {duration(time.high)}"))
    speed = f"{short(plan.tokens_per_second)} tokens a second"
    rows.append(("speed", speed, "" if plan.mfu is None else f"MFU {share(plan.mfu)}"))
    return _table(rows)


def _traffic_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for axis in dict.fromkeys(one.axis for one in plan.traffic):
        own = [one for one in plan.traffic if one.axis == axis]
        exposed = plan.time.exposed.get(axis, 0.0)
        waiting = f"{share(exposed / plan.time.seconds)} of the step waits" if exposed > 0 else "no one waits"
        yield axis, size(sum(one.sent_bytes for one in own)), f"{_where(own)}; {waiting} for it"


def _head_of_islands(islands: IslandTraffic) -> str:
    server, period = "", f"a round of {count(islands.steps, 'step')}"
    if islands.server_taken_bytes:
        server, period = " and their server", "a step"
    return f"between {count(islands.members, 'island')}{server}, in {period}; not in the time above"


def _island_rows(islands: IslandTraffic) -> Iterator[tuple[str, str, str]]:
    yield "an island sends", size(islands.sent_bytes), ""
    yield "an island takes", size(islands.taken_bytes), ""
    if islands.server_taken_bytes:
        server = "the server" if islands.server_shards == 1 else "a shard of the server"
        yield f"{server} sends", size(islands.server_sent_bytes), ""
        yield f"{server} takes", size(islands.server_taken_bytes), ""


def _where(own: Sequence[AxisTraffic]) -> str:
    place = "between machines" if any(one.crosses_machines for one in own) else "within a machine"
    phases = dict.fromkeys(one.overlaps.value for one in own if one.overlaps is not None)
    beside = f", beside the {' and the '.join(sorted(phases, reverse=True))}" if phases else ""
    return f"{sum(one.calls for one in own):,} calls of {own[0].size} ranks {place}{beside}"


def _run_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    yield "the run", describe_whole_run(plan), ""
    if plan.kept_bytes_per_step:
        number = plan.max_steps or 1
        steps = "a step" if plan.max_steps is None else "all steps"
        yield (
            "on disk",
            size(plan.kept_bytes_per_step * number),
            f"at most, of the teacher's likeliest tokens, for {steps}",
        )
    yield "bound by", plan.binds, ""
    if plan.advice is not None:
        yield "try", plan.advice, ""


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Align three columns: a name, a value and a note."""
    listed = list(rows)
    first = max(len(name) for name, _, _ in listed)
    # A sentence in place of a value does not widen the column.
    second = max((len(value) for _, value, note in listed if note), default=0)
    for name, value, note in listed:
        yield f"  {name:<{first}}  {value:>{second}}  {note}" if note else f"  {name:<{first}}  {value:>{second}}"
