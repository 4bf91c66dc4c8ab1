"""What the server does wrong, and to which requests."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Status:
    """Answer with this status instead."""

    code: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """Close the connection after so many bytes of the body: of the answer, or, of an upload, of the request."""

    after_bytes: int


@dataclass(frozen=True)
class Slow:
    """Wait before the answer."""

    seconds: float


@dataclass(frozen=True)
class BadBytes:
    """Send other bytes, as many."""


@dataclass
class Fault:
    """Do `what` to the next `times` requests whose line `METHOD /path` matches."""

    pattern: str
    what: Status | Cut | Slow | BadBytes
    times: int = 1


class Faults:
    """Those that are planned."""

    def __init__(self) -> None:
        self._planned: list[Fault] = []
        self._lock = threading.Lock()

    def plan(self, pattern: str, what: Status | Cut | Slow | BadBytes, times: int = 1) -> None:
        self._planned.append(Fault(pattern, what, times))

    def take(self, line: str) -> Status | Cut | Slow | BadBytes | None:
        with self._lock:
            for fault in self._planned:
                if fault.times and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault.what
        return None
