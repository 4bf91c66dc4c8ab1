"""`launch.*`: the processes that a recipe starts by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfdist.config.ranges import LIMIT, Limit, limited

AUTO = "auto"
_PROCESSES = Limit(
    f"a whole number >= 1, or {AUTO} (one for each GPU of this machine)",
    lambda value: value == AUTO or (value.isdecimal() and int(value) >= 1),
)


@dataclass(kw_only=True)
class LaunchConfig:
    """On this machine. Under `accelerate launch` and torchrun, which start the processes, it has no effect."""

    processes: str = field(default="1", metadata={LIMIT: _PROCESSES})
    """Processes that train: a number, or `auto`, one for each GPU of this machine."""
    max_restarts: int = limited(0, at_least=0)
    """How often all processes start again, from the newest checkpoint, after one was lost or told to stop."""
