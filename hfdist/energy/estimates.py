"""Energy that nobody measures: load times watts."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from contextlib import suppress

import psutil

from hfdist.energy.meter import Meter, Source

WATTS_PER_CORE = 5.0
"""Watts of a host under full load for each core that the system counts, where nobody gives the host's watts."""


class DeviceAtFullLoad(Meter):
    """A device that takes its watts all the time."""

    source = Source.estimate

    def __init__(self, watts: float) -> None:
        self._watts, self._begin_seconds = watts, time.monotonic()

    def joules(self) -> float:
        """Give the energy since the meter was made."""
        return self._watts * (time.monotonic() - self._begin_seconds)


class ProcessLoad(Meter):
    """This process's share of its host: CPU seconds of it and of its loaders, of so many watts for all cores."""

    source = Source.estimate

    def __init__(self, host_watts: float | None) -> None:
        self._watts_per_core = WATTS_PER_CORE if host_watts is None else host_watts / (os.cpu_count() or 1)
        self._begin_seconds = self._last_seconds = _cpu_seconds()

    def joules(self) -> float:
        """Give the energy since the meter was made."""
        self._last_seconds = max(self._last_seconds, _cpu_seconds())
        return self._watts_per_core * (self._last_seconds - self._begin_seconds)


def _cpu_seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in multiprocessing.active_children():
        with suppress(psutil.Error):
            times = psutil.Process(child.pid).cpu_times()
            seconds += times.user + times.system
    return seconds
