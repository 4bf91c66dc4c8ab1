"""An alert about a run: what is wrong, at which step, and the figures that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class AlertKind(Enum):
    """What can be wrong in a run; a detector finds each kind."""

    loss_spike = "loss_spike"
    plateau = "plateau"
    grad_norm_drift = "grad_norm_drift"
    slow_rank = "slow_rank"
    data_wait = "data_wait"
    falling_throughput = "falling_throughput"
    disk_filling = "disk_filling"
    old_checkpoint = "old_checkpoint"
    mirror = "mirror"
    mismatch = "mismatch"


@dataclass(frozen=True)
class Detection:
    """What a detector has found to be wrong."""

    text: str
    """One line for the reader: what is wrong, with its figures, and what to do."""
    figures: Mapping[str, float | int | str]
    """The same figures by name, for programs."""


@dataclass(frozen=True)
class Alert(Detection):
    """A detection that a reader is told of, with its step and kind."""

    step: int
    """Step at which the detection was made."""
    kind: AlertKind

    def to_json(self) -> dict[str, object]:
        """Give the alert as JSON values, as in `events.jsonl`."""
        return {"step": self.step, "kind": self.kind.value, "text": self.text, **self.figures}
