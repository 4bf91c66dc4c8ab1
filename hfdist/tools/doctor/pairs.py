"""The pairs of ranks whose links are tried: their figures, their rounds, and what follows from them. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hfdist.tools.doctor.finding import Finding, Level
from hfdist.units import count, list_first

SIZES_MIB = (1, 16)
"""Sizes of the messages that are sent, in MiB."""
_LARGEST = str(SIZES_MIB[-1])
_LEAST_LOCAL_GBS = 0.1
"""Least 10^9 bytes a second within a machine: a slower link means that processes have no core to themselves."""
_MOST_OF_ONE_STREAM_GBS = 1.0
"""Most 10^9 bytes a second of one connection of gloo, on however fast a link."""
_MOST_OFFSET_SECONDS = 1.0
"""Most seconds by which clocks may differ."""
_NAMED_PAIRS = 6
_MOST_SLOW = 32
"""Most slow pairs that are measured again, one at a time."""


@dataclass(kw_only=True)
class Pair:
    """Two ranks, and the figures of the link between them."""

    ranks: tuple[int, int]
    """Both ranks, the lower one first."""
    hosts: tuple[str, str]
    """Host of each of the two."""
    backend: str
    """Backend that was tried: `gloo` or `nccl`."""
    error: str | None = None
    """Why the two could not connect; None: they could."""
    latency_seconds: float = 0.0
    """Seconds of a small message, one way."""
    gbs: dict[str, float] = field(default_factory=dict)
    """10^9 bytes a second of a message, by its size in MiB as text."""
    all_reduce_gbs: dict[str, float] = field(default_factory=dict)
    """10^9 bytes a second of an all-reduce of both ranks, by size in the same way."""
    offset_seconds: float = 0.0
    """Seconds by which the second rank's clock is ahead."""

    @property
    def speed(self) -> float:
        """The speed of the largest message, in 10^9 bytes a second; 0: this rank has not measured it."""
        return self.gbs.get(_LARGEST, 0.0)

    @property
    def is_local(self) -> bool:
        """Whether both ranks are on one machine."""
        return self.hosts[0] == self.hosts[1]

    def to_json(self) -> dict[str, object]:
        """Give the pair as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Pair:
        """Read what `to_json` has given on another rank: JSON has no tuples."""
        return cls(**content | {"ranks": tuple(content["ranks"]), "hosts": tuple(content["hosts"])})


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Divide all pairs of ranks into rounds, in each of which a rank is in one pair at most.

    This is a tournament by the circle method: the first rank stays, and the others move on by a place each round.

        0 1 2      0 5 1      0 4 5
        5 4 3      4 3 2      3 2 1      pairs stand one above the other
    """
    circle: list[int | None] = list(ranks)
    if len(circle) % 2:
        circle.append(None)  # The partner of a rank that has none in a round.
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        couples = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None])
        first, *others, last = circle
        circle = [first, last, *others]
    return found


def find_slow(pairs: Sequence[Pair]) -> list[Pair]:
    """Find the pairs below half of the median speed, within machines and between them; the slowest come first."""
    found = []
    for is_local in (True, False):
        kind = [pair for pair in pairs if pair.error is None and pair.is_local is is_local]
        if len(kind) > 2:
            median = statistics.median(pair.speed for pair in kind)
            found += [pair for pair in kind if pair.speed < median / 2]
    return sorted(found, key=lambda pair: pair.speed)[:_MOST_SLOW]


def judge_pairs(pairs: Sequence[Pair], link_gbs: Mapping[str, float]) -> list[Finding]:
    """Say which pairs are dead or slow, and how fast the others are.

    Args:
        pairs: pairs of one backend.
        link_gbs: speed of the network link of each host whose speed is known, in 10^9 bytes a second.
    """
    backend = pairs[0].backend
    alive = [pair for pair in pairs if pair.error is None]
    found = _judge_dead([pair for pair in pairs if pair.error is not None])
    for is_local in (True, False):
        kind = [pair for pair in alive if pair.is_local is is_local]
        if kind:
            found += _judge_speed(kind, link_gbs, f"{backend} {'in a machine' if is_local else 'between machines'}")
    return found


def judge_clocks(pairs: Sequence[Pair]) -> list[Finding]:
    """Compare the clock of each host with the first host's clock, by what their pairs have measured."""
    between = [pair for pair in pairs if pair.error is None and not pair.is_local]
    if not between:
        return []
    reference, _ = between[0].hosts
    largest: dict[str, float] = {}
    for pair in between:
        first, host = pair.hosts
        if first == reference:
            largest[host] = max(largest.get(host, 0.0), pair.offset_seconds, key=abs)
    far = {host: seconds for host, seconds in largest.items() if abs(seconds) > _MOST_OFFSET_SECONDS}
    if not far:
        most = 1000 * max(map(abs, largest.values()))
        return [Finding.of("clocks", f"{len(largest) + 1} machines agree within {most:.0f} ms")]
    hint = "start NTP there, as chronyd: records and logs of machines are compared by time"
    found = []
    for host, seconds in far.items():
        side = "ahead of" if seconds > 0 else "behind"
        text = f"{host}'s clock is {abs(seconds):.1f} s {side} {reference}'s"
        found.append(Finding("clocks", Level.warning, text, hint))
    return found


def _judge_dead(dead: Sequence[Pair]) -> list[Finding]:
    """Give one finding for all dead pairs of the same two hosts."""
    by_hosts: dict[tuple[str, str], list[Pair]] = {}
    for pair in dead:
        by_hosts.setdefault(pair.hosts, []).append(pair)
    found = []
    for (a, b), pairs in by_hosts.items():
        names = list_first((f"{pair.ranks[0]}-{pair.ranks[1]}" for pair in pairs), _NAMED_PAIRS)
        place = f"on {a}" if a == b else f"on {a} and {b}"
        text = f"ranks {names} ({place}) cannot speak to each other: {pairs[0].error}"
        if a == b:
            hint = "free the machine's memory and ports; NCCL_DEBUG=INFO tells more of NCCL"
        else:
            hint = (
                f"`ip route get` and `ping` from {a} to {b}; a firewall must leave their ports above 1023 open; "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface that both share"
            )
        found.append(Finding(f"{pairs[0].backend} links", Level.error, text, hint))
    return found


def _judge_speed(pairs: Sequence[Pair], link_gbs: Mapping[str, float], check: str) -> list[Finding]:
    """Give a finding for each slow pair, and one about all pairs of a kind."""
    speeds = [pair.speed for pair in pairs]
    median = statistics.median(speeds)
    found = []
    for pair in find_slow(pairs):
        first, second = pair.hosts
        text = (
            f"ranks {pair.ranks[0]}-{pair.ranks[1]} ({first}, {second}) reach {pair.speed:.3f} "
            f"GB/s at {_LARGEST} MiB, where the median of {len(pairs)} pairs is {median:.3f}"
        )
        hint = f"`ethtool` of both interfaces, their cables and switch ports; else leave {second} out"
        found.append(Finding(check, Level.warning, text, hint))
    low, high = min(speeds), max(speeds)
    reduced = statistics.median(pair.all_reduce_gbs[_LARGEST] for pair in pairs)
    small = statistics.median(pair.gbs[str(SIZES_MIB[0])] for pair in pairs)
    latency = statistics.median(pair.latency_seconds for pair in pairs)
    expected, reason = _expect(pairs, link_gbs)
    text = (
        f"{count(len(pairs), 'pair')}: {_LARGEST} MiB at {low:.2f} to {high:.2f} GB/s (median "
        f"{median:.2f}, all-reduce {reduced:.2f}), {SIZES_MIB[0]} MiB at {small:.2f}, "
        f"{1e6 * latency:.0f} us; expected: {expected:.2f}, {reason}"
    )
    hint = "an interface that is faster: GLOO_SOCKET_IFNAME; or nothing else on these machines meanwhile"
    return [*found, Finding.of(check, text, warning=median < expected, hint=hint)]


def _expect(pairs: Sequence[Pair], link_gbs: Mapping[str, float]) -> tuple[float, str]:
    """Give the least speed that pairs of a kind should reach, in 10^9 bytes a second, and why."""
    known = [link_gbs[host] for pair in pairs for host in pair.hosts if host in link_gbs]
    if pairs[0].is_local:
        return _LEAST_LOCAL_GBS, "the least within a machine"
    if known:
        slowest_link = min(known)
        return min(slowest_link, _MOST_OF_ONE_STREAM_GBS) / 2, f"half of what one stream fills of {slowest_link:.2f}"
    return 0.0, "the speed of the links is not known"
