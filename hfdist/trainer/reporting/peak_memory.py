"""The most memory that this process has used: since the last reading, and in all.

Reading resets the count of the system or of torch, so that what was the most before is kept here.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_largest_bytes: dict[str, int] = {}
"""Of the process, by kind; at readings."""


def read_peak(device: torch.device) -> int:
    """Give the most bytes since the last reading: allocated on a GPU, or resident in the host's memory.

    Where the system cannot reset its count, the second is the most since the process began.
    """
    if device.type == "cuda":
        peak = _note("GPU", torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = _note("host", _resident_bytes())
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    return peak


def largest_peaks(device: torch.device) -> dict[str, int]:
    """Give the most bytes of the process: `host`, and `GPU` if the device is one."""
    now = {"host": _resident_bytes()}
    if device.type == "cuda":
        now["GPU"] = torch.cuda.max_memory_allocated(device)
    return {kind: max(peak, _largest_bytes.get(kind, 0)) for kind, peak in now.items()}


def _note(kind: str, peak_bytes: int) -> int:
    _largest_bytes[kind] = max(peak_bytes, _largest_bytes.get(kind, 0))
    return peak_bytes


def _resident_bytes() -> int:
    """Since the process began, or since the count was reset; pages of mapped files included."""
    with suppress(OSError, ValueError):
        status = (_PROCESS / "status").read_bytes()
        return int(status[status.index(b"VmHWM:") + len(b"VmHWM:") :].split(None, 1)[0]) * 2**10
    # In KiB, but in bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
