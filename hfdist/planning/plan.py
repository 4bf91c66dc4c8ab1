"""A plan: what a run will need, as one value that is printed, written to plan.json and graded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from hfdist.planning.costs import AxisTraffic, PeakMemory, StepTime
from hfdist.planning.island_traffic import IslandTraffic
from hfdist.units import SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a run in one layout on one hardware."""

    layout: str
    """The layout as `Topology.describe` gives it, with sharding and precision."""
    hardware: str
    processes: int
    memory: PeakMemory
    usable_bytes: float
    """Usable bytes of one device, or of the share of the host's memory that a process has."""
    flops_per_step: float
    """FLOPs of all ranks in a step, by the formula that MFU counts (models/flops.py)."""
    time: StepTime
    tokens_per_step: int
    mfu: float | None
    traffic: tuple[AxisTraffic, ...]
    max_steps: int | None
    islands: IslandTraffic | None = None
    """Bytes between islands, which the time of a step leaves out; None: there are no islands."""
    ideal_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by component, without factors: see `StepParts`."""
    kept_bytes_per_step: int = 0
    """The most bytes on disk of the teacher's likeliest tokens, for the tokens of a step; 0: they are not kept."""
    is_traced: bool = True
    """Whether memory and operations are those of a trace; otherwise of the formulas of a search."""
    timed_runs: int = 0
    """Past runs on such hardware whose steps correct the time."""
    adapter: str = ""
    """What an adapter stands beside and trains, by the parts of the blocks; empty: there is none."""
    cost: float | None = None
    currency: str = "USD"
    kwh: float | None = None
    """Energy of the whole run in kWh."""
    binds: str = "compute"
    """What a step's time or the layout is bound by: `memory`, `compute` or `link`."""
    advice: str | None = None
    """The one change that would help most, with its override."""
    not_counted: str = ""
    """What of the run is in no figure, in words; empty: nothing. Such a plan is not graded."""

    @property
    def fits(self) -> bool:
        """Whether the memory of the worst rank is enough."""
        return self.memory.use.total <= self.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens_per_step / self.time.seconds

    @property
    def hours(self) -> float | None:
        """Hours of the whole run."""
        return None if self.max_steps is None else self.max_steps * self.time.seconds / SECONDS_PER_HOUR

    def to_json(self) -> dict[str, object]:
        """Give what plan.json holds."""
        values = asdict(self)
        values["memory"]["phase"] = self.memory.phase.value
        for of_axis, one in zip(values["traffic"], self.traffic, strict=True):
            of_axis["overlaps"] = None if one.overlaps is None else one.overlaps.value
        derived = {"fits": self.fits, "tokens_per_second": self.tokens_per_second, "hours": self.hours}
        return values | derived
