"""The energy of a host's processors and memory, by the counters that Linux shows in a folder (RAPL)."""

from __future__ import annotations

from pathlib import Path

from hfdist.energy.meter import Meter, Source

POWERCAP = Path("/sys/class/powercap")
_SAMPLE_SECONDS = 30.0
"""Seconds between two readings: a counter starts again from 0 after a quarter of an hour under full load."""


class Rapl(Meter):
    """The sum over all packages, which hold the cores, and over memory where it has a counter of its own.

    `psys`, the whole board, is left out: it holds the packages.

    Raises:
        OSError: there are no counters, or this user may not read them.
    """

    source = Source.rapl
    sample_seconds = _SAMPLE_SECONDS

    def __init__(self, powercap: Path = POWERCAP) -> None:
        zones = [path for path in sorted(powercap.glob("intel-rapl:*")) if _is_counted(path)]
        if not zones:
            raise FileNotFoundError(f"no counters in {powercap}")
        self._ranges = {zone: _read(zone / "max_energy_range_uj") for zone in zones}
        self._last = {zone: _read(zone / "energy_uj") for zone in zones}
        self._joules = 0.0

    def joules(self) -> float:
        """Give the energy since the meter was made."""
        for zone, last in self._last.items():
            try:
                now = _read(zone / "energy_uj")
            except OSError:
                continue
            step = now - last if now >= last else now + self._ranges[zone] - last
            self._joules += step / 1e6
            self._last[zone] = now
        return self._joules


def _is_counted(zone: Path) -> bool:
    name = (zone / "name").read_text(encoding="ascii").strip()
    return name.startswith("package-") or name == "dram"


def _read(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
