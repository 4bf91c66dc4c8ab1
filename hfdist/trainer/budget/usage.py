"""Sums energy over the ranks now and then, and what follows from it: cost and CO2 equivalent."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.collectives import gather_json, rank, world_size
from hfdist.config.run import CostConfig
from hfdist.energy import Place, RankMeter, describe_sources, name_sources
from hfdist.energy.rank_meter import is_known, num_devices
from hfdist.records import RunRecorder
from hfdist.records.run_file import SUMMED

logger = logging.getLogger(__name__)

_READ_SECONDS = 10.0
"""Between two sums over the ranks: each gathers about 1 KB a rank."""
_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600


class Usage(TrainerCallback):
    """Keeps the figures of energy and cost in the record of a run. All ranks have it.

    It is a `RankFlag`, too: rank 0 says before a step whether the ranks sum at its end, so most steps cost nothing.

    Args:
        recorder: of rank 0.
        cost: prices, and the watts of what is not measured.
        device: on which this rank computes.
    """

    def __init__(self, recorder: RunRecorder | None, cost: CostConfig, device: torch.device) -> None:
        self._recorder, self._cost = recorder, cost
        self._meter = RankMeter(_uuid(device), device_watts=cost.device_watts, host_watts=cost.host_watts)
        self._group: dist.ProcessGroup | None = None
        self._places: list[Place] = []
        self._begin_seconds = self._read_seconds = time.monotonic()
        self._joules, self._watts = 0.0, 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell each other what can be measured, and share it out. A collective."""
        if self._places:
            return
        if world_size() > 1:
            # On the CPU: a GPU is not waited for.
            self._group = dist.new_group(backend="gloo")
        self._places = [Place(**place) for place in gather_json(asdict(self._meter.place), self._group)]
        self._meter.begin(rank(), self._places)
        if self._recorder is not None:
            self._recorder.record.energy_source = name_sources(self._places) if self.is_known else None
            watts = {"device_watts": self._cost.device_watts, "host_watts": self._cost.host_watts}
            logger.info("energy: %s", describe_sources(self._places, **watts))
            self.note()

    @property
    def is_known(self) -> bool:
        """Whether all devices and hosts tell or estimate their energy."""
        return is_known(self._places)

    def flag(self) -> int:
        """1, of rank 0: it is time to sum again."""
        return int(self._recorder is not None and time.monotonic() - self._read_seconds > _READ_SECONDS)

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Sum. A collective."""
        self.read()

    def read(self) -> None:
        """Sum the energy of all ranks, and note it. A collective."""
        joules = sum(gather_json(self._meter.joules(), self._group))
        now = time.monotonic()
        seconds = max(now - self._read_seconds, 1e-3)
        # The highest power counts for what is to come: loading takes less than training.
        self._watts = max((joules - self._joules) / seconds, joules / max(now - self._begin_seconds, 1e-3))
        self._joules, self._read_seconds = joules, now
        if self._recorder is not None:
            self.note()

    def note(self) -> None:
        """Write the figures of this moment into the record; on rank 0. What was used since the last sum is added."""
        assert self._recorder is not None
        record, cost = self._recorder.record, self._cost
        kwh = (self._joules + self._watts * (time.monotonic() - self._read_seconds)) / _JOULES_PER_KWH
        record.energy_kwh = kwh if self.is_known and self._joules > 0 else None
        hours = self._recorder.seconds / _SECONDS_PER_HOUR
        of_devices = None if cost.price_per_hour is None else cost.price_per_hour * hours * num_devices(self._places)
        of_energy = _times(cost.price_per_kwh, record.energy_kwh)
        parts = [
            part
            for price, part in ((cost.price_per_hour, of_devices), (cost.price_per_kwh, of_energy))
            if price is not None
        ]
        record.cost = None if not parts or None in parts else sum(part for part in parts if part is not None)
        record.gco2e = _times(cost.gco2e_per_kwh, record.energy_kwh)

    def rates(self) -> dict[str, float]:
        """Give what a second uses of each budget, by the power of late and the prices."""
        kwh = self._watts / _JOULES_PER_KWH
        cost = (self._cost.price_per_hour or 0.0) * num_devices(self._places) / _SECONDS_PER_HOUR
        cost += (self._cost.price_per_kwh or 0.0) * kwh
        return {"max_hours": 1 / _SECONDS_PER_HOUR, "max_cost": cost, "max_kwh": kwh, "deadline": 1.0}

    def figures(self) -> dict[str, float]:
        """Give what a training line says: totals over all starts, as far as they are known; {} on all but rank 0."""
        if self._recorder is None:
            return {}
        self.note()
        totals = {name: self._recorder.record.total(name) for name in SUMMED}
        return {name: total for name, total in totals.items() if total is not None}

    def close(self) -> None:
        """Measure no more. On rank 0, the record keeps the figures of this moment."""
        if self._recorder is not None and self._places:
            self.note()
        self._meter.close()


def _times(price: float | None, amount: float | None) -> float | None:
    return None if price is None or amount is None else price * amount


def _uuid(device: torch.device) -> str | None:
    """As the driver writes it; None: not of NVIDIA."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
