"""`watch.*`: when a rank counts as lost."""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.config.ranges import limited


@dataclass(kw_only=True)
class WatchConfig:
    """Of runs with several processes."""

    heartbeat_seconds: float | None = limited(60.0, at_least=1)
    """A rank that is silent for so long, or without progress while the others wait for it, ends the run with exit code
    6; null: no watch."""
