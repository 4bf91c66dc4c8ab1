"""What a whole run takes, by the plan of its step: hours, energy and money."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from hfdist.config.run import RunConfig
from hfdist.energy.estimates import WATTS_PER_CORE
from hfdist.planning.plan import Plan
from hfdist.planning.searching.evaluate import Machines


def with_steps(plan: Plan, config: RunConfig, machines: Machines, max_steps: int | None) -> Plan:
    """Give the plan with the number of steps of the run, and the energy (kWh) and the cost that follow from it.

    Args:
        plan: the plan of one step.
        config: the run's config; its `cost` has prices and powers that a user gives.
        machines: where the run is to be.
        max_steps: number of steps of the run; None: that is not known, nor what follows from it.
    """
    plan = replace(plan, max_steps=max_steps)
    if plan.hours is None:
        return plan
    cost, hardware = config.cost, machines.hardware

    watts = _watts(config, machines, plan.processes)
    kwh = None if watts is None else watts * plan.hours / 1000

    price_per_hour = hardware.price_per_hour if cost.price_per_hour is None else cost.price_per_hour
    # Where ranks compute on CPUs, the device that has a price is the host.
    devices = _num_hosts(machines, plan.processes) if hardware.is_cpu else plan.processes
    rent = None if price_per_hour is None else price_per_hour * devices * plan.hours
    electricity = None if kwh is None or cost.price_per_kwh is None else kwh * cost.price_per_kwh
    amounts = [amount for amount in (rent, electricity) if amount is not None]
    return replace(plan, kwh=kwh, cost=sum(amounts) if amounts else None)


def _watts(config: RunConfig, machines: Machines, processes: int) -> float | None:
    """Give the power of all devices, or of the hosts where these compute; None: it is not known."""
    hardware, cost = machines.hardware, config.cost
    if hardware.is_cpu:
        host_watts = cost.host_watts or WATTS_PER_CORE * (os.cpu_count() or 1)
        return host_watts * _num_hosts(machines, processes)
    device_watts = hardware.watts if cost.device_watts is None else cost.device_watts
    return None if device_watts is None else device_watts * processes


def _num_hosts(machines: Machines, processes: int) -> int:
    return math.ceil(processes / machines.per_machine)
