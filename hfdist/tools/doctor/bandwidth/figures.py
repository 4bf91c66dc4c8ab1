"""The figures of collectives, as NCCL's own tests define them, and the links that they show. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from hfdist.config.hardware import START_SECONDS

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
BROADCAST, POINT_TO_POINT = "broadcast", "point to point"
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, POINT_TO_POINT)
ALL, IN_MACHINE, BETWEEN = "all ranks", "in a machine", "between machines"
LEAST_LINK_BYTES = 1 << 20
"""Least bytes of the largest tensor: smaller tensors tell nothing of a link's speed."""
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))
_MOST_DIGITS = 18
"""Digits of the longest size that is read: Python refuses to read some thousands."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The times of one collective of one size in one group of ranks."""

    group: str
    """Which ranks are measured together: ALL, IN_MACHINE or BETWEEN."""
    kind: str
    num_ranks: int
    """Number of ranks in the group; where each machine has a group of its own, in the slowest one."""
    size_bytes: int
    """Bytes of the tensor that is reduced, sent or exchanged; for a gather or a scatter, of all shares together."""
    seconds: float
    """Seconds of a call by the slowest rank: the median over rounds."""
    low_seconds: float
    """Seconds of a call in the quickest round."""
    high_seconds: float
    """Seconds of a call in the slowest round."""
    cpu_seconds: float
    """CPU seconds of a call by one rank with all its threads: the mean over ranks."""
    runs_as: str = ""
    """The backend's own name of what it does; empty: it does not say it."""

    @property
    def algorithm_gbs(self) -> float:
        """The size of the tensor over the time of a call, in 10^9 bytes a second."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def bus_gbs(self) -> float:
        """What each rank's link carries in a ring, in 10^9 bytes a second, whatever the number of ranks."""
        share = (self.num_ranks - 1) / self.num_ranks
        factor = {ALL_REDUCE: 2 * share, BROADCAST: 1.0, POINT_TO_POINT: 1.0}.get(self.kind, share)
        return factor * self.algorithm_gbs

    def to_json(self) -> dict[str, object]:
        """Give the figure as JSON values."""
        return asdict(self) | {"algorithm_gbs": self.algorithm_gbs, "bus_gbs": self.bus_gbs}


class Link(NamedTuple):
    """A link between ranks, as a plan needs it."""

    gbs: float
    """10^9 bytes a second that one rank sends."""
    latency_seconds: float
    """Seconds that one message takes, whatever its size."""


def slowest(figures: Sequence[Figure]) -> list[Figure]:
    """Join the figures of several ranks, and of several machines: the slowest time, and the mean CPU time."""
    by_place: dict[tuple[str, str, int], list[Figure]] = {}
    for one in figures:
        by_place.setdefault((one.group, one.kind, one.size_bytes), []).append(one)
    found = []
    for same in by_place.values():
        worst = max(same, key=lambda one: one.seconds)
        cpu_seconds = sum(one.cpu_seconds for one in same) / len(same)
        found.append(Figure(**asdict(worst) | {"cpu_seconds": cpu_seconds}))
    order = {ALL: 0, IN_MACHINE: 1, BETWEEN: 2}
    return sorted(found, key=lambda one: (order[one.group], KINDS.index(one.kind), one.size_bytes))


def fit_link(figures: Sequence[Figure], group: str) -> Link | None:
    """Give the link that the all-reduces of a group show; None: there are none of two sizes, or they are small.

    A call takes a time of its own and one for each byte: the line through the smallest and the largest size. The
    quickest rounds are taken, as whatever else the machine does makes a round longer. Sizes between do not count: a
    backend, or a shaped link, has other rules for some of them. A ring's bytes are those that the bus carries, and a
    small call waits for its hops, as planning counts them.
    """
    own = [one for one in figures if one.group == group and one.kind == ALL_REDUCE]
    # Half of it: a size that ranks share is rounded down to equal shares.
    if len({one.size_bytes for one in own}) < 2 or max(one.size_bytes for one in own) < LEAST_LINK_BYTES / 2:
        return None
    by_size = sorted(own, key=lambda one: one.size_bytes)
    start, per_byte = _line(by_size[0], by_size[-1])
    num_ranks = own[0].num_ranks
    # Hops are counted as plans count them, there and back: along the ring of gloo or the chain of NCCL within a
    # machine, and down the tree of NCCL between machines.
    on_cpu = own[0].runs_as.startswith("gloo")
    hops = 2 * (num_ranks - 1 if on_cpu or group == IN_MACHINE else math.ceil(math.log2(num_ranks)))
    if not on_cpu:
        # A plan counts the start of a kernel by itself.
        start = max(0.0, start - START_SECONDS)
    sent_share = 2 * (num_ranks - 1) / num_ranks
    return Link(gbs=sent_share / per_byte / 1e9, latency_seconds=start / hops)


def _line(small: Figure, large: Figure) -> tuple[float, float]:
    """Give the seconds of a call of no bytes, and those of a byte; no start is below 0."""
    per_byte = (large.low_seconds - small.low_seconds) / (large.size_bytes - small.size_bytes)
    start = small.low_seconds - per_byte * small.size_bytes
    if per_byte <= 0 or start < 0:
        # The measurement is noise: the largest size alone counts.
        return 0.0, large.low_seconds / large.size_bytes
    return start, per_byte


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Give the lines of the tables for people, one table for each group."""
    titles = ["", "size", "time", "algorithm GB/s", "bus GB/s", "CPU", "runs as"]
    for group in dict.fromkeys(one.group for one in figures):
        own = [one for one in figures if one.group == group]
        rows = [titles, *map(_row, own)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield f"{group}: {own[0].num_ranks} ranks"
        for first, *middle, last in rows:
            cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
            yield "  ".join([first.ljust(widths[0]), *cells, last]).rstrip()
        yield ""


def _row(one: Figure) -> list[str]:
    seconds, cpu_seconds = describe_seconds(one.seconds), describe_seconds(one.cpu_seconds)
    speeds = (f"{one.algorithm_gbs:.3f}", f"{one.bus_gbs:.3f}")
    return [one.kind, describe_size(one.size_bytes), seconds, *speeds, cpu_seconds, one.runs_as]


def describe_size(num_bytes: int) -> str:
    """Give bytes such as `64 MiB`."""
    for unit, power in _UNITS:
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.3g} {unit}"
    return f"{num_bytes} B"


def read_size(text: str) -> int | None:
    """Read bytes such as `64MiB` or `1024`; None: it is no size."""
    number, power = text, 0
    for unit, of_unit in _UNITS:
        if text.lower().endswith(unit.lower()):
            number, power = text[: -len(unit)].strip(), of_unit
    return int(number) << power if number.isdecimal() and len(number) <= _MOST_DIGITS else None


def describe_seconds(seconds: float) -> str:
    """Give a duration with three digits, such as `1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
