"""The arguments that `hfdist doctor` and `hfdist bandwidth` share: the number of ranks, and time limits."""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.config.cli.arguments import read_number
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.ranges import DAY_SECONDS
from hfdist.config.run import AUTO
from hfdist.errors import ConfigError
from hfdist.topology import read_launcher


def read_seconds(values: Mapping[str, str], name: str, default: str) -> float:
    """Read a time limit in seconds. ConfigError: it is no whole number, or more than the day that stores can wait."""
    seconds = read_number(values, name, default)
    if seconds > DAY_SECONDS:
        where, allowed = f"{name} ({COMMAND_LINE})", f"at most {DAY_SECONDS:g}, which is a day"
        raise ConfigError("no such value", where=where, found=seconds, allowed=allowed)
    return float(seconds)


def read_processes(values: Mapping[str, str]) -> tuple[int, bool]:
    """Read the key `processes`.

    Returns:
        The number of ranks to start, 1 for none, and whether a launcher has started several.

    Raises:
        ConfigError: a wrong value, or another number than the launcher's.
    """
    place = read_launcher()
    processes = read_number(values, "processes", AUTO) if values.get("processes", AUTO) != AUTO else None
    if place.world_size > 1 and processes not in (None, 1, place.world_size):
        found = f"{processes}, and {place.world_size} of the launcher"
        what, hint = "the launcher has started another number of processes", f"processes={AUTO}"
        raise ConfigError(what, where="processes", found=found, hint=hint)
    if place.world_size == 1 and processes != 1:
        processes = _choose(processes)
    return processes or 1, place.world_size > 1


def _choose(asked: int | None) -> int:
    """Give the number of ranks to start on this machine; None: it was not asked for. ConfigError: too few GPUs."""
    # Imported here, as it loads torch, which counts GPUs.
    from hfdist.launch.launch import count_gpus

    gpus = count_gpus()
    if asked is not None and 0 < gpus < asked:
        raise ConfigError("each rank needs a GPU of its own", where="processes", found=f"{asked}, with {gpus}",
                          hint=f"processes={AUTO}")  # fmt: skip
    # A single GPU has no link to try. Without one, two ranks show whether processes of this machine reach each other.
    return asked or gpus or 2
