"""What `hfdist plan` is asked, read from its command line and checked."""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.config.cli.about_run import LineAboutRun
from hfdist.config.hardware import Hardware
from hfdist.config.plan import PlanConfig
from hfdist.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned."""

    line: LineAboutRun
    config: RunConfig
    plan: PlanConfig
    hardware: Hardware | None
    """Hardware that is named; None: what is at hand."""
    processes: int | None
    """Number of processes; None: it is to be found."""
    as_json: bool = False
