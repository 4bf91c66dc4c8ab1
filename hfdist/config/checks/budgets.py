"""Budgets: what a run may use over all of its starts, and whether it has before this one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hfdist.config.checks.conflict import conflict
from hfdist.config.run import RunConfig
from hfdist.config.train import parse_time
from hfdist.errors import BudgetError, ConfigError
from hfdist.records import Event, RunRecord, read_lines, read_run
from hfdist.units import SECONDS_PER_HOUR, count

BUDGETS = ("max_hours", "max_cost", "max_kwh", "deadline")
"""Keys of `train.*`. A deadline is seconds since 1970, as `time.time` gives them."""


def find_limits(config: RunConfig) -> dict[str, float]:
    """Give the limit of each budget that is set."""
    train = config.train
    given = {name: getattr(train, name) for name in BUDGETS}
    if train.deadline is not None:
        given["deadline"] = parse_time(train.deadline).timestamp()
    return {name: float(limit) for name, limit in given.items() if limit is not None}


def find_used(record: RunRecord) -> dict[str, float | None]:
    """Give what all starts of a run have used by now of each budget; None: nobody knows."""
    hours = (record.total("seconds") or 0.0) / SECONDS_PER_HOUR
    known = {"max_cost": record.total("cost"), "max_kwh": record.total("energy_kwh")}
    return {"max_hours": hours, **known, "deadline": time.time()}


def check_budgets(config: RunConfig) -> None:
    """Refuse a start for which nothing is left.

    Raises:
        BudgetError: earlier starts have used up a budget, or one has stopped for it, with something left for a save.
        ConfigError: a deadline that had passed before the first start, or a run.json that cannot be read.
    """
    limits = find_limits(config)
    if not limits:
        return
    record = read_run(config.run.folder.path)
    if record is None:
        _check_first_start(config, limits)
        return
    used, ended_at = find_used(record), _find_earlier_stops(config.run.folder.events)
    for name, limit in limits.items():
        now = used[name]
        if limit <= ended_at.get(name, 0) or (now is not None and now >= limit):
            raise used_up(config, name, now, record)


def _check_first_start(config: RunConfig, limits: Mapping[str, float]) -> None:
    """Refuse a record that cannot be read, as nobody knows then what is used, and a deadline that has passed."""
    path = config.run.folder.record
    if path.exists():
        what, found = "what earlier starts have used is not known", "a file that cannot be read"
        allowed = f"a {path.name} of this version of hfdist"
        hint = f"rm {path}, to count from nothing; or another run.name"
        raise ConfigError(what, where=str(path), found=found, allowed=allowed, hint=hint)
    deadline = limits.get("deadline")
    if deadline is not None and deadline <= time.time():
        what, allowed = "the deadline has passed", "a time to come, or null"
        found = f"{config.train.deadline}, and it is {describe('deadline', time.time(), config)}"
        hint = "train.deadline=null, or a later time; without a time zone it is that of this machine"
        raise ConfigError(what, where="train.deadline", found=found, allowed=allowed, hint=hint)


def check_limits(config: RunConfig) -> None:
    """Refuse a budget without checkpoints, as the run could not go on, and a cost limit without prices.

    Raises:
        ConfigError: either.
    """
    limits, cost = find_limits(config), config.cost
    if limits and config.checkpoint.every is None:
        key = f"train.{next(iter(limits))}"
        what = "a run whose budget is used up goes on from its checkpoint, and none is written"
        hint = f"checkpoint.every=100, or {key}=null"
        raise conflict(config, f"{key} checkpoint.every", what, allowed="null", hint=hint)
    if "max_cost" in limits and cost.price_per_hour is None and cost.price_per_kwh is None:
        what, hint = "nothing is known of what the run costs", "cost.price_per_hour=2.5 (of one GPU)"
        keys = "train.max_cost cost.price_per_hour cost.price_per_kwh"
        raise conflict(config, keys, what, allowed="null without a price", hint=hint)


def used_up(config: RunConfig, name: str, used: float | None, record: RunRecord) -> BudgetError:
    """Give the error of a budget, with the override that lets the run go on."""
    limit = find_limits(config)[name]
    starts = f"after {count(record.start, 'start')}"
    if name == "deadline":
        found = f"{config.train.deadline}, {starts}; it is {describe(name, used, config)}"
        hint = "train.deadline=null or a later time; the same command with it goes on from the last checkpoint"
    else:
        found = f"{describe(name, used, config)} of {describe(name, limit, config)}, {starts}"
        if used is not None and used < limit:
            found += "; the rest is kept for the save, the evaluation and the export"
        enough = f"train.{name}={_enough(limit, used, record):g}"
        hint = f"{enough}; the same command with it goes on from the last checkpoint"
    return BudgetError("the budget of the run is used up", where=f"train.{name}", found=found, hint=hint)


def _enough(limit: float, used: float | None, record: RunRecord) -> float:
    """Give a limit for all steps of the run and a tenth more, rounded up to two digits.

    Twice the limit, if no step is done.
    """
    # Numbers as anybody may have written them.
    step, max_steps = record.step, record.max_steps
    if not used or not isinstance(step, int) or not isinstance(max_steps, int) or step <= 0:
        return 2 * limit
    needed = max(1.1 * used * max_steps / step, 1.1 * limit)
    digit = 10.0 ** (math.floor(math.log10(needed)) - 1)
    return math.ceil(needed / digit) * digit


def describe(name: str, value: float | None, config: RunConfig) -> str:
    """Give a value of a budget with its unit."""
    if value is None:
        return "an unknown part"
    if name == "deadline":
        return to_iso(value, "seconds")
    return f"{value:.4g} {({'max_hours': 'h', 'max_kwh': 'kWh', 'max_cost': config.cost.currency})[name]}"


def to_iso(seconds: float, timespec: str = "auto") -> str:
    """Give a time since 1970 as ISO 8601, in this machine's time zone."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec=timespec)


def _find_earlier_stops(events: Path) -> Mapping[str, float]:
    """Give the highest limit of each budget at which a start has stopped: it kept what a save needs."""
    stops: dict[str, float] = {}
    for event in read_lines(events):
        if event.get("event") == Event.budget.value and event.get("which") in BUDGETS:
            # A file that anybody may have written.
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                given = event["limit"]
                limit = parse_time(given).timestamp() if isinstance(given, str) else float(given)
                stops[event["which"]] = max(limit, stops.get(event["which"], 0.0))
    return stops
