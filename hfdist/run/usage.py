"""The energy of a run, summed over the ranks now and then, and what follows from it: cost and CO2 equivalent."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.collectives import gather_json, rank
from hfdist.config.checks.budgets import find_used
from hfdist.config.run import CostConfig
from hfdist.control_group import ControlGroup, control_group
from hfdist.energy import EnergySources, RankMeter, describe_sources, is_known, name_sources, num_devices
from hfdist.records import RunRecord, RunRecorder
from hfdist.records.run_file import SUMMED
from hfdist.units import SECONDS_PER_HOUR, duration, energy, mass, money

logger = logging.getLogger(__name__)

_READ_SECONDS = 10.0
"""The most seconds between two sums over the ranks: each sum gathers about 1 KB a rank."""
_READ_SHARE = 0.05
"""The ranks sum again after this share of the time so far: early steps draw other power than later ones."""
_SOURCES = {None: "of earlier starts", "estimate": "an estimate"}
"""Text for sources of a run's energy whose name says too little; None: this start has no source."""
_JOULES_PER_KWH = 3.6e6
_LEAST_SECONDS = 1e-3
"""Two sums may come at once: no power is divided by a shorter time."""


class Usage(TrainerCallback):
    """Keeps the figures of energy and cost in the record of a run. All ranks have it.

    It is a `RankFlag`, too: rank 0 says before a step whether the ranks sum at its end, so most steps cost nothing.

    Args:
        recorder: writes the run's record, on rank 0; None on the others.
        cost: prices, and the watts of what is not measured.
        device: the device on which this rank computes.
    """

    def __init__(self, recorder: RunRecorder | None, cost: CostConfig, device: torch.device) -> None:
        self._recorder, self._cost = recorder, cost
        self._meter = RankMeter(_uuid(device), device_watts=cost.device_watts, host_watts=cost.host_watts)
        self._group: ControlGroup | None = None
        self._sources: list[EnergySources] = []
        self._begin_seconds = self._read_seconds = time.monotonic()
        """When measuring began, and when the ranks last summed, on the monotonic clock."""
        self._joules: float | None = None
        """Energy of all ranks at the last sum; None: there was no sum yet."""
        self._watts = 0.0
        """Power of all ranks that is expected until the next sum."""

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Let the ranks tell each other what they can measure, and share out who measures what. A collective."""
        if self._sources:
            return
        self._group = control_group()
        self._sources = [EnergySources(**one) for one in gather_json(asdict(self._meter.sources), self._group)]
        self._meter.begin(rank(), self._sources)
        if self._recorder is not None:
            self._recorder.record.energy_source = name_sources(self._sources) if self.is_known else None
            watts = {"device_watts": self._cost.device_watts, "host_watts": self._cost.host_watts}
            logger.info("energy: %s", describe_sources(self._sources, **watts))
            self.note()

    @property
    def is_known(self) -> bool:
        """Whether all devices and hosts tell or estimate their energy."""
        return is_known(self._sources)

    def flag(self) -> int:
        """Give 1 on rank 0 when it is time to sum again, else 0."""
        now = time.monotonic()
        interval = min(_READ_SECONDS, _READ_SHARE * (now - self._begin_seconds))
        is_due = self._joules is None or now - self._read_seconds > interval
        return int(self._recorder is not None and is_due)

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Sum over the ranks. A collective."""
        self.read()

    def read(self) -> None:
        """Sum the energy of all ranks, and note it. A collective."""
        joules = sum(gather_json(self._meter.joules(), self._group))
        now = time.monotonic()
        watts_since_last_sum = (joules - (self._joules or 0.0)) / max(now - self._read_seconds, _LEAST_SECONDS)
        watts_since_begin = joules / max(now - self._begin_seconds, _LEAST_SECONDS)
        # The higher one is expected from now on: ranks that wait draw less power than those that train.
        self._watts = max(watts_since_last_sum, watts_since_begin)
        self._joules, self._read_seconds = joules, now
        if self._recorder is not None:
            self.note()

    def note(self) -> None:
        """Write the present figures into the record, with the energy of the last sum. On rank 0 alone."""
        assert self._recorder is not None
        record, cost = self._recorder.record, self._cost
        if self.is_known and self._joules is not None:
            record.energy_kwh = self._joules / _JOULES_PER_KWH
        record.cost = self._find_cost(record.energy_kwh)
        record.gco2e = _times(cost.gco2e_per_kwh, record.energy_kwh)

    def _find_cost(self, energy_kwh: float | None) -> float | None:
        """Give the cost of devices and energy; None: no price is given, or the energy that has one is not known."""
        assert self._recorder is not None
        cost = self._cost
        parts = []
        if cost.price_per_hour is not None:
            device_hours = self._recorder.seconds / SECONDS_PER_HOUR * num_devices(self._sources)
            parts.append(cost.price_per_hour * device_hours)
        if cost.price_per_kwh is not None:
            if energy_kwh is None:
                # The price of the devices alone would pass for the whole.
                return None
            parts.append(cost.price_per_kwh * energy_kwh)
        return sum(parts) if parts else None

    def find_used(self) -> dict[str, float | None]:
        """Give what the run has used by now of each budget, by its key and in its unit; None: not known.

        The energy since the last sum is estimated from its power.
        """
        used = find_used(self.totals())
        kwh_since_sum = self._watts * (time.monotonic() - self._read_seconds) / _JOULES_PER_KWH
        since_sum = {"max_kwh": kwh_since_sum, "max_cost": kwh_since_sum * (self._cost.price_per_kwh or 0.0)}
        return {name: None if value is None else value + since_sum.get(name, 0.0) for name, value in used.items()}

    def totals(self) -> RunRecord:
        """Give a copy of the record with the present figures. On rank 0 alone."""
        assert self._recorder is not None
        self.note()
        return replace(self._recorder.record, seconds=self._recorder.seconds)

    def find_rates(self) -> dict[str, float]:
        """Give how much of each budget a second uses, by its key and in its unit."""
        kwh = self._watts / _JOULES_PER_KWH
        cost = (self._cost.price_per_hour or 0.0) * num_devices(self._sources) / SECONDS_PER_HOUR
        cost += (self._cost.price_per_kwh or 0.0) * kwh
        return {"max_hours": 1 / SECONDS_PER_HOUR, "max_cost": cost, "max_kwh": kwh, "deadline": 1.0}

    def figures(self) -> dict[str, float]:
        """Give the figures of a training line: totals over all starts, as far as they are known; {} on other ranks."""
        if self._recorder is None:
            return {}
        record = self.totals()
        totals = {name: record.total(name) for name in SUMMED}
        return {name: total for name, total in totals.items() if total is not None}

    def close(self) -> None:
        """End the measuring; on rank 0, the record keeps the last figures."""
        if self._recorder is not None and self._sources:
            self.note()
        self._meter.close()


def describe_usage(record: RunRecord, cost: CostConfig) -> str:
    """Say in one line how much time, energy and money all starts have used, as far as it is known."""
    kwh, spent, grams = (record.total(name) for name in SUMMED)
    parts = [duration(record.earlier_seconds + record.seconds)]
    if kwh is not None:
        parts.append(f"{energy(kwh)} ({_SOURCES.get(record.energy_source, record.energy_source)})")
    if grams is not None:
        parts.append(f"{mass(grams)} CO2e")
    if spent is not None:
        parts.append(money(spent, cost.currency))
    if record.start > 1:
        parts.append(f"in {record.start} starts")
    return ", ".join(parts)


def _times(price: float | None, amount: float | None) -> float | None:
    return None if price is None or amount is None else price * amount


def _uuid(device: torch.device) -> str | None:
    """Give the UUID of a CUDA device as its driver writes it; None: another device."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
