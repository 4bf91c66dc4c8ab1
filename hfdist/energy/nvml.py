"""The energy of an NVIDIA device, by the driver (package nvidia-ml-py)."""

from __future__ import annotations

import time
from types import ModuleType

from hfdist.energy.meter import Meter, Source

_SAMPLE_SECONDS = 1.0


def open_device(uuid: str) -> Meter | None:
    """Give a meter of a device; None: no package, no driver, or a device that tells neither energy nor power.

    `uuid` is as the driver writes it, such as `GPU-8b086d4c-...`: it does not depend on CUDA_VISIBLE_DEVICES.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        try:
            return EnergyCounter(pynvml, handle)
        except pynvml.NVMLError:
            # Devices before Volta, and parts of a device, have no counter.
            return PowerOverTime(pynvml, handle)
    except pynvml.NVMLError:
        return None


class EnergyCounter(Meter):
    """The driver's counter, in mJ since the driver was loaded."""

    source = Source.nvml

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml, self._handle = nvml, handle
        self._last_millijoules = self._read()
        self._joules = 0.0

    def joules(self) -> float:
        """Give the energy since the meter was made."""
        try:
            now = self._read()
        except self._nvml.NVMLError:
            # A device that has failed ends the run soon enough.
            return self._joules
        # A driver that was loaded anew counts from 0.
        self._joules += max(now - self._last_millijoules, 0) / 1e3
        self._last_millijoules = now
        return self._joules

    def _read(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


class PowerOverTime(Meter):
    """The device's power in mW, taken as constant from one reading to the next."""

    source = Source.nvml
    sample_seconds = _SAMPLE_SECONDS

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml, self._handle = nvml, handle
        self._watts, self._last_seconds = self._read(), time.monotonic()
        self._joules = 0.0

    def joules(self) -> float:
        """Give the energy since the meter was made."""
        now = time.monotonic()
        self._joules += self._watts * (now - self._last_seconds)
        self._last_seconds = now
        try:
            self._watts = self._read()
        except self._nvml.NVMLError:
            self._watts = 0.0
        return self._joules

    def _read(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3
