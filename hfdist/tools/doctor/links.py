"""Tests of links: ranks meet at a store and try each pair with a time limit, so that one dead pair stops no other.

Not in the run's own process group: gloo's needs all links, and fails on all ranks when one is cut.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hfdist.errors import ResourceError, first_line, printable
from hfdist.launch.address import address_of, listen
from hfdist.launch.gloo_interface import VARIABLE, address_of_own_name, choose_gloo_interface
from hfdist.messages.message import NotAMessageError, read_json
from hfdist.tools.doctor.pairs import SIZES_MIB, Pair
from hfdist.topology import LauncherPlace

JOIN_SECONDS = 60.0
"""Seconds that all ranks have to come."""
_LATE_SECONDS = 30.0
"""Seconds that a rank may need for its other checks."""
_LATENCY_ROUNDS = 10
_REPEATS = 3
_LONG_SECONDS = 0.1
"""A message of a MiB that takes so long is not repeated: the link is slow, and that is all there is to learn."""


class Rendezvous:
    """The store of one examination, in which ranks leave JSON for each other.

    Args:
        place: the place of this process among the ranks.

    Raises:
        ResourceError: the store of rank 0, or of the launcher, is not reached.
    """

    def __init__(self, place: LauncherPlace) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        host, port = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "29500")
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        limit = timedelta(seconds=JOIN_SECONDS / 2)
        try:
            store = dist.TCPStore(host, int(port), is_master=serves, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]  # not in torch's stubs
        except (RuntimeError, TypeError, ValueError) as error:  # a port beyond those that there are is a TypeError
            what, where = f"rank {self.rank} does not reach the store", f"MASTER_ADDR={host} MASTER_PORT={port}"
            hint = "the address of rank 0's machine, as the others see it, and a port that no firewall closes"
            found = f"from {socket.gethostname()}: {first_line(error)}"
            raise ResourceError(what, where=where, found=found, hint=hint) from error
        self._store = dist.PrefixStore("doctor", store)  # type: ignore[attr-defined]  # as above

    def tell(self, name: str, value: object) -> None:
        """Leave a value for the other ranks, as JSON."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def hear(self, name: str, rank: int, seconds: float) -> Any:
        """Wait for the value that a rank leaves, and give it; None: there is none after `seconds`."""
        key = f"{name}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            return read_json(self._store.get(key))
        except (RuntimeError, NotAMessageError):
            return None

    def hear_all(self, name: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Give the values of ranks by rank, within `seconds` for all of them together."""
        deadline = time.monotonic() + seconds
        heard = {rank: self.hear(name, rank, deadline - time.monotonic()) for rank in ranks}
        return {rank: value for rank, value in heard.items() if value is not None}

    @contextmanager
    def group(self, name: str, backend: str, ranks: Sequence[int], seconds: float) -> Iterator[None]:
        """Start a default process group of these ranks, and end it after the block."""
        limit = timedelta(seconds=seconds)
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]  # as above
        own = [*ranks].index(self.rank)
        try:
            dist.init_process_group(backend, store=store, rank=own, world_size=len(ranks), timeout=limit)
            yield
        finally:
            if dist.is_initialized():
                _end_group(backend)


def meet(place: LauncherPlace) -> Rendezvous:
    """Join the other ranks; ResourceError: this rank does not reach them."""
    if not os.environ.get(VARIABLE):
        # As each run does, so that the links of a run are tried.
        choose_gloo_interface()
    begun = time.monotonic()
    try:
        return Rendezvous(place)
    except ResourceError:
        if place.rank != 0:
            # A launcher ends all ranks as soon as one has failed: rank 0 first says who is missing.
            time.sleep(max(0.0, JOIN_SECONDS + 10 - (time.monotonic() - begun)))
        raise


def try_pairs(
    rendezvous: Rendezvous,
    backend: str,
    schedule: Sequence[Sequence[tuple[int, int]]],
    hosts: Callable[[int], str],
    seconds: float,
    *,
    is_second: bool = False,
) -> list[Pair]:
    """Try the pairs to which this rank belongs, a rank in one at a time.

    Args:
        rendezvous: the store of all ranks.
        backend: `gloo` or `nccl`.
        schedule: rounds of pairs, the same on all ranks.
        hosts: gives the machine of a rank.
        seconds: seconds that a pair may take to connect, and for each message.
        is_second: whether rounds have one pair each, and wait for the end of the one before.
    """
    found = []
    label = f"{backend}-again" if is_second else backend
    for number, pairs in enumerate(schedule):
        for ab in (pair for pair in pairs if rendezvous.rank in pair):
            # A dead pair may have kept the other one in each round before, and a slow disk or the Hub before them.
            patience = _LATE_SECONDS + 3 * seconds * (number + 1)
            if is_second and number > 0:
                rendezvous.hear(f"{label}-done-{number - 1}", schedule[number - 1][0][0], patience)
            pair = Pair(ranks=ab, hosts=(hosts(ab[0]), hosts(ab[1])), backend=backend)
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
        # Until then the listener must stay.
        told = rendezvous.hear(f"{name}/problem", other, 2 * seconds)
    return problem or (f"rank {other} hangs" if told is None else told[0])


def _try(rendezvous: Rendezvous, pair: Pair, name: str, seconds: float) -> None:
    try:
        with rendezvous.group(name, pair.backend, pair.ranks, seconds):
            _measure(pair)
    except Exception as error:
        # Whatever a backend raises: that is the finding.
        pair.error = what_failed(error)


def what_failed(error: Exception) -> str:
    """Give the first line of a backend's error, without the place in its source."""
    return printable(re.sub(r"\[/[^\]]*\] ?", "", first_line(error)), 160)


def _measure(pair: Pair) -> None:
    """Measure latency, clocks and speeds on both ranks together; the first one keeps the figures."""
    device = torch.device("cuda", torch.cuda.current_device()) if pair.backend == "nccl" else torch.device("cpu")
    own = dist.get_rank()
    trips = [_round_trip(own, device) for _ in range(_LATENCY_ROUNDS)]
    seconds, pair.offset_seconds = min(trips)
    pair.latency_seconds = seconds / 2
    repeats = _REPEATS
    for mib in SIZES_MIB:
        tensor = torch.zeros(mib << 18, device=device)
        # There and back: two messages.
        best = min(_timed(lambda: _send_and_receive(own, tensor), device) for _ in range(repeats))  # noqa: B023
        pair.gbs[str(mib)] = 2 * tensor.nbytes / best / 1e9
        reduced = min(_timed(lambda: dist.all_reduce(tensor), device) for _ in range(repeats))  # noqa: B023
        pair.all_reduce_gbs[str(mib)] = tensor.nbytes / reduced / 1e9
        agreed = torch.tensor([1 if best > _LONG_SECONDS else _REPEATS], device=device)
        dist.broadcast(agreed, src=0)
        repeats = int(agreed)
    if own == 1:
        # Its clock begins to count before the other one sends.
        pair.gbs.clear()
        pair.all_reduce_gbs.clear()


def _round_trip(own: int, device: torch.device) -> tuple[float, float]:
    """Give the seconds of a small message there and back, and how far the second's clock is ahead, at their middle."""
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    sent = time.time()
    if own == 0:
        dist.send(stamp, 1)
        dist.recv(stamp, 1)
        received = time.time()
        return received - sent, offset_seconds(sent, float(stamp), received)
    dist.recv(stamp, 0)
    stamp.fill_(time.time())
    dist.send(stamp, 0)
    return 0.0, 0.0


def offset_seconds(sent: float, theirs: float, received: float) -> float:
    """Give how far a clock is ahead that was read between `sent` and `received` of the own one."""
    return theirs - (sent + received) / 2


def _send_and_receive(own: int, tensor: torch.Tensor) -> None:
    for action in (dist.send, dist.recv) if own == 0 else (dist.recv, dist.send):
        action(tensor, 1 - own)


def _timed(action: Callable[[], object], device: torch.device) -> float:
    begun = time.monotonic()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - begun


def measure_all(rendezvous: Rendezvous, backend: str, ranks: Sequence[int], seconds: float) -> dict[str, float] | str:
    """Measure an all-reduce of all these ranks. A collective.

    Returns:
        10^9 bytes a second by MiB, as NCCL's own tests count the bus: 2 (n - 1) / n times the bytes; or what was wrong.
    """
    own = Pair(ranks=(0, 0), hosts=("", ""), backend=backend)
    try:
        with rendezvous.group(f"{backend}-all", backend, ranks, 2 * seconds):
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
            for mib in SIZES_MIB:
                tensor = torch.zeros(mib << 18, device=device)
                best = min(_timed(lambda: dist.all_reduce(tensor), device) for _ in range(_REPEATS))  # noqa: B023
                factor = 2 * (len(ranks) - 1) / len(ranks)
                own.all_reduce_gbs[str(mib)] = factor * tensor.nbytes / best / 1e9
    except Exception as error:
        return what_failed(error)
    return own.all_reduce_gbs


def prepare_nccl() -> None:
    """Let NCCL raise an error in place of ending the process. Call it before the first group."""
    os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")


def _end_group(backend: str) -> None:
    """End the default group; one of NCCL that has failed would wait for its other rank."""
    with suppress(Exception):
        if backend == "nccl":
            group = dist.distributed_c10d._get_default_group()
            group._get_backend(torch.device("cuda")).abort()
    with suppress(Exception):
        dist.destroy_process_group()


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
        # A virtual one names a speed that nothing keeps.
        if address in {one.address.partition("%")[0] for one in found} and (folder / "device").exists():
            with suppress(OSError, ValueError):
                megabits = int((folder / "speed").read_text())
                return megabits / 8000 if megabits > 0 else None
    return None
