"""The most memory that this process has used: since the last reading, and in all.

Reading resets the count of the system or of torch, so that what was the most before is kept here.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from typing import BinaryIO

import torch

_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"
_NEARLY_BYTES = 2**20
"""The two counts are not taken at the same time."""
_largest_bytes: dict[str, int] = {}
"""The most bytes that the process has had at a reading, by kind: `GPU` or `host`."""


class PeakMemory:
    """The most bytes since the last reading: allocated on a GPU, or resident in the host's memory.

    Where the system cannot reset its count, the second is the most since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status: BinaryIO | None = None
        self._reset: BinaryIO | None = None
        if device.type != "cuda":
            # Not each system has them.
            with suppress(OSError):
                self._reset = open(_RESET, "wb", buffering=0)  # noqa: SIM115
                self._status = open(_STATUS, "rb", buffering=0)  # noqa: SIM115
        self.read()
        if _resident_bytes(None) <= _resident_bytes(self._status) + _NEARLY_BYTES:
            # The system call says the same ten times as fast, unless the process was another program with more memory.
            self._status = None

    def read(self) -> int:
        """Give the peak since the last call, and begin anew."""
        kind, peak = _peak_bytes(self._device, self._status)
        if kind == "GPU":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._reset is not None:
            with suppress(OSError):
                os.pwrite(self._reset.fileno(), b"5", 0)
        return peak


def largest_peaks(device: torch.device) -> dict[str, int]:
    """Give the most bytes of the process: `host`, and `GPU` if the device is one."""
    kinds = [_peak_bytes(own, None)[0] for own in dict.fromkeys((torch.device("cpu"), device))]
    return {kind: _largest_bytes[kind] for kind in kinds}


def _peak_bytes(device: torch.device, status: BinaryIO | None) -> tuple[str, int]:
    """Give what is counted, and its most bytes since its count was reset; the largest is kept."""
    if device.type == "cuda":
        kind, peak = "GPU", torch.cuda.max_memory_allocated(device)
    else:
        kind, peak = "host", _resident_bytes(status)
    _largest_bytes[kind] = max(peak, _largest_bytes.get(kind, 0))
    return kind, peak


def _resident_bytes(status: BinaryIO | None) -> int:
    """The most bytes since the process began, or since the count was reset; pages of mapped files included."""
    if status is not None:
        content = os.pread(status.fileno(), 8192, 0)
        if (begin := content.find(b"VmHWM:")) >= 0:
            return int(content[begin + len(b"VmHWM:") :].split(None, 1)[0]) * 2**10
    # In KiB, but in bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
