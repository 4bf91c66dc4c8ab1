"""What one rank counts of a run's energy: its device, and its host or its own share of it, each thing once."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.energy.estimates import WATTS_PER_CORE, DeviceAtFullLoad, ProcessLoad
from hfdist.energy.meter import Meter, Source
from hfdist.energy.nvml import open_device
from hfdist.energy.rapl import POWERCAP, Rapl
from hfdist.units import count

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class EnergySources:
    """Where a rank computes, and what energy can be read there; JSON values, for the other ranks."""

    host: str
    """The machine: one for all containers on it."""
    has_rapl: bool
    device: str | None
    """Name of the device; None: the rank computes on the host's processors."""
    device_source: str | None
    """Where the energy of the device is read; None: nobody knows it."""


class RankMeter:
    """Counts from its making on; `begin` says what belongs to this rank.

    Args:
        device: the UUID of the rank's NVIDIA device; None: it computes on the host's processors.
        device_watts: watts of a device that cannot be measured; None: its energy is not known.
        host_watts: watts of a whole host that cannot be measured, under full load; None: 5 W for each core.
        powercap: the folder of RAPL's counters.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        device_watts: float | None = None,
        host_watts: float | None = None,
        powercap: Path = POWERCAP,
    ) -> None:
        self._device: Meter | None = None if device is None else open_device(device)
        if device is not None and self._device is None and device_watts is not None:
            self._device = DeviceAtFullLoad(device_watts)
        self._host: Meter = _open_host(host_watts, powercap)
        has_rapl = self._host.source is Source.rapl
        self.sources = EnergySources(
            host=_machine(),
            has_rapl=has_rapl,
            device=device,
            device_source=None if self._device is None else self._device.source.value,
        )
        self._share = ProcessLoad(host_watts) if has_rapl else self._host
        self._counted: list[Meter] = []
        # A thread samples what must be read often, and the counters are not made for two at once.
        self._lock, self._is_closed = threading.Lock(), threading.Event()

    def begin(self, rank: int, by_rank: Sequence[EnergySources]) -> None:
        """Count what belongs to this rank, as all ranks know from the sources of all."""
        own = by_rank[rank]
        device_ranks = [other for other, sources in enumerate(by_rank) if sources.device == own.device]
        rapl_ranks = [other for other, sources in enumerate(by_rank) if sources.host == own.host and sources.has_rapl]
        if self._device is not None and rank == device_ranks[0]:
            self._counted.append(self._device)
        if not rapl_ranks:
            self._counted.append(self._share)
        elif rank == rapl_ranks[0]:
            self._counted.append(self._host)
        intervals = [meter.sample_seconds for meter in self._counted if meter.sample_seconds is not None]
        if intervals:
            threading.Thread(target=self._sample, args=[min(intervals)], name="energy", daemon=True).start()

    def joules(self) -> float:
        """Give the energy of what this rank counts, since the meter was made."""
        with self._lock:
            return sum(meter.joules() for meter in self._counted)

    def close(self) -> None:
        """Sample no more."""
        self._is_closed.set()

    def _sample(self, seconds: float) -> None:
        while not self._is_closed.wait(seconds):
            self.joules()


def _open_host(host_watts: float | None, powercap: Path) -> Meter:
    try:
        return Rapl(powercap)
    except (OSError, ValueError):
        return ProcessLoad(host_watts)


def _machine() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def is_known(by_rank: Iterable[EnergySources]) -> bool:
    """Whether the energy of each device is counted: a part of the sum would pass for the whole."""
    return all(sources.device is None or sources.device_source is not None for sources in by_rank)


def num_devices(by_rank: Sequence[EnergySources]) -> int:
    """Give the number of devices that a run pays for: GPUs, or where it computes on processors, hosts."""
    devices = {sources.device for sources in by_rank if sources.device is not None}
    return len(devices) or len({sources.host for sources in by_rank})


def name_sources(by_rank: Iterable[EnergySources]) -> str:
    """Name what the figures come from, such as `nvml+estimate`."""
    by_rank = list(by_rank)
    found = {sources.device_source for sources in by_rank if sources.device_source is not None}
    found |= {(Source.rapl if has_rapl else Source.estimate).value for has_rapl in _has_rapl(by_rank).values()}
    return "+".join(source.value for source in Source if source.value in found)


def describe_sources(by_rank: Iterable[EnergySources], *, device_watts: float | None, host_watts: float | None) -> str:
    """Say what is counted and how, in one line."""
    by_rank = list(by_rank)
    devices = {sources.device: sources.device_source for sources in by_rank if sources.device is not None}
    words: dict[object, str] = {
        "nvml": "measured by NVML",
        "estimate": f"estimated at {device_watts:g} W" if device_watts is not None else "",
        None: "not known (cost.device_watts estimates it)",
    }
    parts = [f"{count(number, 'GPU')} {words[source]}" for source, number in Counter(devices.values()).items()]
    load = f"{WATTS_PER_CORE:g} W a core" if host_watts is None else f"{host_watts:g} W a host"
    ways = {True: "measured by RAPL (processors and memory)", False: f"estimated from CPU time at {load}"}
    parts += [f"{count(number, 'host')} {ways[way]}" for way, number in Counter(_has_rapl(by_rank).values()).items()]
    return ", ".join(parts)


def _has_rapl(by_rank: Iterable[EnergySources]) -> dict[str, bool]:
    """Say of each host whether one of its ranks reads the host's counters."""
    found: dict[str, bool] = {}
    for sources in by_rank:
        found[sources.host] = found.get(sources.host, False) or sources.has_rapl
    return found
