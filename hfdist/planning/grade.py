"""A plan beside the measurements of its run, item by item, as grade.json has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from hfdist.planning.costs import bytes_by_axis
from hfdist.planning.describe import uses
from hfdist.planning.plan import Plan
from hfdist.strategies.traffic import Phase

SCHEMA = 1
PEAK, STEP = "peak memory", "step"


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that one rank holds, as they are."""

    peak: float
    """The most bytes in all steps."""
    parts: Mapping[str, float]
    """Bytes by the fields of `MemoryUse` that can be told apart: what a layout keeps in itself is in the rest. Without
    `runtime`, the peak does not hold it either."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a run; None: not measured."""

    held: Held | None = None
    """Bytes that the rank with the highest peak holds."""
    rank: int = 0
    """The rank with the highest peak."""
    step_seconds: float | None = None
    """The median of steady steps."""
    steps: int = 0
    """Number of steps that this start has done."""
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that one rank sends in a step, by axis."""
    cost: float | None = None
    """Cost of this start, with what it did besides steps."""
    kwh: float | None = None
    """Energy of this start in kWh, with what it did besides steps."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One figure of a plan, with its measured value."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None: nothing was measured to compare with."""
        return self.predicted / self.measured - 1 if self.measured else None


def grade(plan: Plan, measured: Measured) -> list[Item]:
    """Compare each figure that was both planned and measured."""
    return [*_memory(plan, measured), *_time(plan, measured), *_traffic(plan, measured), *_used(plan, measured)]


def grade_to_json(plan: Plan, measured: Measured) -> dict[str, object]:
    """Give what grade.json holds."""
    items = [asdict(item) | {"error": item.error} for item in grade(plan, measured)]
    head = {"schema": SCHEMA, "hardware": plan.hardware, "processes": plan.processes, "layout": plan.layout}
    return head | {"rank": measured.rank, "steps": measured.steps, "items": items}


def _memory(plan: Plan, measured: Measured) -> Iterator[Item]:
    held = measured.held
    if held is None:
        return
    planned = dict(uses(plan.memory.use))
    if "runtime" not in held.parts:
        del planned["runtime"]
    yield Item(name=PEAK, unit="bytes", predicted=sum(planned.values()), measured=held.peak)
    known = {name: value for name, value in held.parts.items() if name in planned}
    if plan.memory.phase is Phase.backward:
        # At the peak there are only some gradients, and the measurement counts all of them.
        known.pop("gradients", None)
    for name, value in known.items():
        yield Item(name=name, unit="bytes", predicted=planned[name], measured=value)
    rest = [name for name in planned if name not in known]
    measured_rest = max(held.peak - sum(known.values()), 0.0)
    yield Item(
        name=" and ".join(rest),
        unit="bytes",
        predicted=sum(planned[name] for name in rest),
        measured=measured_rest,
    )


def _time(plan: Plan, measured: Measured) -> Iterator[Item]:
    seconds = measured.step_seconds
    if seconds is None:
        return
    speed, flops = plan.tokens_per_step / seconds, plan.flops_per_step / seconds
    yield Item(name=STEP, unit="seconds", predicted=plan.time.seconds, measured=seconds)
    yield Item(name="speed", unit="tokens a second", predicted=plan.tokens_per_second, measured=speed)
    planned_flops = plan.flops_per_step / plan.time.seconds
    yield Item(name="computing", unit="FLOPs a second", predicted=planned_flops, measured=flops)
    if plan.mfu is not None:
        yield Item(name="MFU", unit="", predicted=plan.mfu, measured=plan.mfu * plan.time.seconds / seconds)


def _traffic(plan: Plan, measured: Measured) -> Iterator[Item]:
    planned = bytes_by_axis(plan.traffic)
    for axis in [axis for axis in planned if axis in measured.sent_bytes]:
        sent = measured.sent_bytes[axis]
        yield Item(name=f"sent along {axis}", unit="bytes", predicted=planned[axis], measured=sent)


def _used(plan: Plan, measured: Measured) -> Iterator[Item]:
    share = measured.steps / plan.max_steps if plan.max_steps else 0.0
    for name, unit, planned, used in (
        ("cost", plan.currency, plan.cost, measured.cost),
        ("energy", "kWh", plan.kwh, measured.kwh),
    ):
        if planned is not None and used is not None and share > 0:
            yield Item(name=name, unit=unit, predicted=planned * share, measured=used)
