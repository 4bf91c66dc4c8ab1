"""One alert: what is wrong, since which step, with its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class AlertKind(Enum):
    """What can be wrong."""

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
    """What a detector sees at a step."""

    text: str
    """One line: what, the figures, what to do."""
    figures: Mapping[str, float | int | str]


@dataclass(frozen=True)
class Alert(Detection):
    """A detection that is new."""

    step: int
    kind: AlertKind

    def to_json(self) -> dict[str, object]:
        """Give the alert as JSON values, as in `events.jsonl`."""
        return {"step": self.step, "kind": self.kind.value, "text": self.text, **self.figures}
