"""`plan.*`: for which hardware and how many processes `hfdist plan` works, and what it looks for.

A plan's keys are no part of a run's config: the same run is planned for many machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hfdist.config.composition.section import Section
from hfdist.config.conf_folder import shipped_folder
from hfdist.config.hardware import CPU
from hfdist.config.ranges import limited
from hfdist.errors import ConfigError


class Find(Enum):
    """What a plan finds the smallest number of."""

    processes = "processes"


@dataclass(kw_only=True)
class PlanConfig:
    """`plan.*`: the machines of a plan, and what is asked."""

    hardware: str | None = None
    """Device of conf/hardware/, such as h100_80gb; null: what this machine has."""
    processes: int | None = limited(None, at_least=1)
    """Number of processes, one a device; null: launch.processes."""
    per_machine: int | None = limited(None, at_least=1)
    """Processes of each machine; null: as the hardware has it."""
    memory_gib: float | None = limited(None, above=0)
    """Memory that each process may use; null: as the hardware has it."""
    search: bool = False
    """Whether all layouts are looked at, in place of the one that is asked."""
    best: int = limited(10, at_least=1)
    """Number of layouts that are shown."""
    find: Find | None = None
    """processes: the fewest on which the run fits; with search in any layout; null: nothing."""
    calibrate: bool = False
    """Whether seven steps of this run run here first, and the plan takes their times."""


GROUP = "plan"
SECTION = Section(PlanConfig, GROUP)
DEFAULTS = shipped_folder() / GROUP / "default.yaml"


def compose_plan(overrides: Sequence[str]) -> PlanConfig:
    """Merge overrides such as `plan.processes=64` over the defaults, and check them; ConfigError: the first mistake."""
    plan: PlanConfig = SECTION.compose(DEFAULTS, overrides)
    if plan.find is not None and plan.processes is not None:
        what, hint = "the number of processes is what is to be found", "leave plan.processes out"
        raise ConfigError(what, where="plan.processes", found=plan.processes, allowed="null", hint=hint)
    if plan.calibrate and plan.hardware not in (None, CPU):
        what, hint = "only the hardware at hand can be measured", "leave plan.hardware out, or plan.calibrate=false"
        raise ConfigError(what, where="plan.calibrate", found=f"true, with {plan.hardware}", hint=hint)
    return plan
