"""The interface of meters of energy, and where a figure comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar


class Source(Enum):
    """Where a figure of energy comes from."""

    nvml = "nvml"
    """A counter of a device, or its power over time."""
    rapl = "rapl"
    """Counters of a host's processors and memory."""
    estimate = "estimate"
    """Load times watts: nothing was measured."""


class Meter(ABC):
    """Counts energy in joules, from the moment when it is made."""

    source: ClassVar[Source]
    """Where its figures come from."""
    sample_seconds: ClassVar[float | None] = None
    """How often `joules` must be called at least; None: it does not matter."""

    @abstractmethod
    def joules(self) -> float:
        """Give the energy since the meter was made."""
