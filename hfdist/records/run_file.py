"""`run.json`: how the last start of a run stands, or how it ended. It is replaced whole: a reader sees no half."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from hfdist.atomic_write import write_atomically
from hfdist.records.lines import reporting_full_disk
from hfdist.records.run_folder import RunFolder

SUMMED = ("energy_kwh", "cost", "gco2e")
"""Figures that are not always known, each with an `earlier_` one."""
SCHEMA = 1
"""Version of all files of records. It grows when a field changes its meaning or goes; readers pass over fields that
they do not know."""


class State(Enum):
    """How a start of a run stands."""

    running = "running"
    finished = "finished"
    """Exit code 0."""
    stopped = "stopped"
    """It has saved, and can go on: told to stop (exit code 75), or a budget is used up (8)."""
    failed = "failed"
    """Any other exit code."""
    lost = "lost"
    """It ended without a word, as a killed process does; found by what started it, or by the next start."""

    @classmethod
    def of(cls, exit_code: int | None) -> State:
        """Give the state that an exit code stands for; None: nobody knows the code."""
        known = {None: cls.lost, 0: cls.finished, 8: cls.stopped, 75: cls.stopped}
        return known.get(exit_code, cls.failed)


@dataclass(kw_only=True)
class RunRecord:
    """The fields of `run.json`. Times are ISO 8601 in UTC."""

    start: int
    """Number of the start in this folder; the first is 1."""
    state: State = State.running
    exit_code: int | None = None
    error: str | None = None
    """What was wrong, in one line without secrets."""
    step: int = 0
    max_steps: int | None = None
    """Number of steps of the run; None: not known yet."""
    tokens: int = 0
    """Tokens read by all data ranks since the run began, earlier starts included."""
    seconds: float = 0.0
    """Seconds since this start has opened its folder, which it does after it has opened its data."""
    earlier_seconds: float = 0.0
    """Seconds of all starts before this one."""
    energy_kwh: float | None = None
    """Energy of this start, in kWh; None: not known, as in all figures below."""
    earlier_energy_kwh: float | None = None
    """Energy of all starts before this one, in kWh, as far as it is known."""
    energy_source: str | None = None
    """What this start's figure comes from: `nvml`, `rapl`, `estimate`, or several with + between."""
    cost: float | None = None
    earlier_cost: float | None = None
    gco2e: float | None = None
    """Grams of CO2 equivalent of this start."""
    earlier_gco2e: float | None = None
    started: str = ""
    updated: str = ""
    """When this file was last written: about once a second while the run logs steps."""
    host: str = ""
    pid: int = 0
    """Process id of rank 0, on `host`."""
    launcher_pid: int = 0
    """Process id of the process that started rank 0."""
    processes: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    """Degree of each axis, and `sharding`."""
    hosts: list[str] = field(default_factory=list)
    """Host of each rank; empty before training."""
    versions: dict[str, str] = field(default_factory=dict)
    traffic: dict[str, Any] | None = None
    """What a rank sends in a step: the counted `step`, and its `axes`; None: not counted, or there is one process."""
    schema: int = SCHEMA

    def sent_bytes(self) -> dict[str, float] | None:
        """Give what the rank that sends most along an axis of the mesh sends in a step, by axis; None: not counted."""
        if self.traffic is None:
            return None
        return {axis: of_axis["sent_bytes"] for axis, of_axis in self.traffic["axes"].items()}

    def total(self, name: str) -> float | None:
        """Give `seconds` or one of `SUMMED` over all starts, as far as it is known; None: of none."""
        values = (getattr(self, f"earlier_{name}"), getattr(self, name))
        # A file that another program has changed may hold anything, and a whole number there has no limit.
        known = [one for one in values if isinstance(one, (int, float)) and abs(one) <= sys.float_info.max]
        return sum(known) if known else None

    def to_json(self) -> dict[str, object]:
        """Give the record as JSON values."""
        return asdict(self) | {"state": self.state.value}


def read_run(run_dir: Path) -> RunRecord | None:
    """Read the record of a run folder; None: there is none, or it is not of this schema."""
    try:
        content = json.loads(RunFolder(run_dir).record.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA or not isinstance(content["start"], int):
            return None
        known = {one.name for one in fields(RunRecord)}
        return RunRecord(**{k: v for k, v in content.items() if k in known} | {"state": State(content["state"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_run(run_dir: Path, record: RunRecord, *, is_durable: bool) -> None:
    """Replace the file; a durable one is on the disk before its name, for a machine that stops.

    Raises:
        ResourceError: the disk is full.
    """
    path = RunFolder(run_dir).record
    with reporting_full_disk(path):
        write_atomically(path, (json.dumps(record.to_json(), indent=1) + "\n").encode(), is_durable=is_durable)
