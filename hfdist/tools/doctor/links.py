"""The trial of links: each pair of ranks by itself, with time limits, so that one dead pair stops no other pair.

rank a                        store                       rank b
listens, tells its address    <-- name/at -->             listens, tells its address
connects to b                                             connects to a
tells what failed             <-- name/problem -->        tells what failed
[ a process group of both by the backend, in which the link is measured ]
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hfdist.errors import first_line, printable
from hfdist.launch.address import address_of, listen
from hfdist.launch.gloo_interface import VARIABLE, address_of_own_name
from hfdist.tools.doctor.link_speed import REPEATS, device_of, measure_pair, quickest
from hfdist.tools.doctor.pairs import SIZES_MIB, Pair
from hfdist.tools.doctor.rendezvous import Rendezvous

_LATE_SECONDS = 30.0
"""Seconds that a rank may need for its other checks."""


def try_pairs(
    rendezvous: Rendezvous,
    backend: str,
    schedule: Sequence[Sequence[tuple[int, int]]],
    hosts: Mapping[int, str],
    seconds: float,
    *,
    is_second: bool = False,
) -> list[Pair]:
    """Try the pairs to which this rank belongs, one after the other.

    Args:
        rendezvous: the store of all ranks.
        backend: `gloo` or `nccl`.
        schedule: rounds of pairs, the same on all ranks.
        hosts: host of each rank.
        seconds: seconds that a pair may take to connect, and for each message.
        is_second: whether these are second tries, in rounds of one pair, each of which waits for the one before.
    """
    found = []
    label = f"{backend}-again" if is_second else backend
    for number, pairs in enumerate(schedule):
        for ab in (pair for pair in pairs if rendezvous.rank in pair):
            # A dead pair may have kept the other one in each round before, and a slow disk or the Hub before them.
            patience = _LATE_SECONDS + 3 * seconds * (number + 1)
            if is_second and number > 0:
                rendezvous.hear(f"{label}-done-{number - 1}", schedule[number - 1][0][0], patience)
            pair = Pair(ranks=ab, hosts=(hosts[ab[0]], hosts[ab[1]]), backend=backend)
            name = f"{label}-{ab[0]}-{ab[1]}"
            pair.error = _connect(rendezvous, pair, name, seconds, patience)
            if pair.error is None:
                _try(rendezvous, pair, name, seconds)
            if is_second and rendezvous.rank == ab[0]:
                rendezvous.tell(f"{label}-done-{number}", True)
            found.append(pair)
    return found


def _connect(rendezvous: Rendezvous, pair: Pair, name: str, seconds: float, patience_seconds: float) -> str | None:
    """Connect both ranks to each other, and give what failed; None: nothing.

    By own sockets first: gloo takes several times its time limit (torch 2.13), and does not say which way is closed.
    """
    other = pair.ranks[1] if rendezvous.rank == pair.ranks[0] else pair.ranks[0]
    own_address = gloo_address()
    try:
        listener = listen(own_address, 0)
    except OSError as error:
        return f"{own_address} cannot be listened on: {error.strerror}"
    with listener:
        rendezvous.tell(f"{name}/at", listener.getsockname()[:2])
        at = rendezvous.hear(f"{name}/at", other, patience_seconds)
        if not (isinstance(at, list) and [type(one) for one in at] == [str, int]):
            return f"rank {other} has ended or hangs"
        problem = None
        try:
            socket.create_connection(tuple(at), timeout=seconds).close()
        except (OSError, OverflowError, ValueError) as error:
            problem = f"{getattr(error, 'strerror', None) or error} when {platform.node()} connects to {at[0]}"
        rendezvous.tell(f"{name}/problem", [problem])
        # The listener stays until the other rank has said whether it could connect.
        told = rendezvous.hear(f"{name}/problem", other, 2 * seconds)
    return problem or (f"rank {other} hangs" if told is None else told[0])


def _try(rendezvous: Rendezvous, pair: Pair, name: str, seconds: float) -> None:
    try:
        with rendezvous.group(name, pair.backend, pair.ranks, seconds):
            measure_pair(pair)
    except Exception as error:
        # Whatever a backend raises: that is the finding.
        pair.error = what_failed(error)


def what_failed(error: Exception) -> str:
    """Give the first line of a backend's error, without the place in the backend's source."""
    return printable(re.sub(r"\[/[^\]]*\] ?", "", first_line(error)), 160)


def measure_all(rendezvous: Rendezvous, backend: str, ranks: Sequence[int], seconds: float) -> dict[str, float] | str:
    """Measure an all-reduce of all these ranks. A collective.

    Returns:
        10^9 bytes a second by size in MiB, as NCCL's own tests count the bus: 2 (n - 1) / n times the bytes; or in
        words what was wrong.
    """
    gbs: dict[str, float] = {}
    try:
        with rendezvous.group(f"{backend}-all", backend, ranks, 2 * seconds):
            device = device_of(backend)
            for mib in SIZES_MIB:
                tensor = torch.zeros(mib << 18, device=device)
                best = quickest(partial(dist.all_reduce, tensor), REPEATS, device)
                gbs[str(mib)] = 2 * (len(ranks) - 1) / len(ranks) * tensor.nbytes / best / 1e9
    except Exception as error:
        return what_failed(error)
    return gbs


def prepare_nccl() -> None:
    """Let NCCL raise an error instead of ending the process. Call this before the first group is made."""
    os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")


def gloo_address() -> str:
    """Give the address that gloo tells the other ranks: that of GLOO_SOCKET_IFNAME, or else of the host's name."""
    for name in os.environ.get(VARIABLE, "").split(","):
        with suppress(OSError):
            return address_of(name)
    return address_of_own_name()


def link_gbs() -> float | None:
    """Give the speed of the interface that gloo uses, in 10^9 bytes a second; None: not known, as of a virtual one."""
    address = gloo_address()
    for name, found in psutil.net_if_addrs().items():
        folder = Path("/sys/class/net") / name
        # The speed that a virtual interface names means nothing.
        if address in {one.address.partition("%")[0] for one in found} and (folder / "device").exists():
            with suppress(OSError, ValueError):
                megabits = int((folder / "speed").read_text())
                return megabits / 8000 if megabits > 0 else None
    return None
