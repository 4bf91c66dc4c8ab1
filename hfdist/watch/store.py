"""The store over which ranks beat: rank 0 serves it on a free port, apart from those of torch and of the launcher."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from hfdist.checkpoint.exchange import gather_json, rank, world_size
from hfdist.watch.beat import Beat
from hfdist.watch.verdict import Verdict

_CONNECT_SECONDS = 30
_FOR_EVER = timedelta(days=365)
_VERDICT = "verdict"


class BeatStore:
    """Every rank's last beat, and the verdict of rank 0. Rank 0 reads all of them, the others only those of rank 0.

    No method is bound to return: rank 0 may be stopped. Whoever calls them must not be the one that judges.

    Raises:
        OSError: some rank cannot reach rank 0. On all ranks alike. A collective.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = rank(), world_size()
        self._store: Any = None
        if self.rank == 0:
            self._store = _tcp_store("", 0)
            for other in range(self.world_size):
                self._store.set(_key(other), Beat(number=0).to_json())
            self._store.set(_VERDICT, "")
        address, port = gather_json([_own_address(), self._store.port] if self.rank == 0 else None)[0]
        problem = None
        if self.rank != 0:
            try:
                self._store = _tcp_store(address, port)
            except RuntimeError as error:
                problem = f"rank {self.rank} cannot reach rank 0 at {address}:{port} ({str(error).splitlines()[0]})"
        problems = [found for found in gather_json(problem) if found is not None]
        if problems:
            raise OSError(problems[0])
        # A link that comes back goes on where it was: who is lost is for others to judge, by the clock.
        self._store.set_timeout(_FOR_EVER)

    def exchange(self, own: Beat, verdict: Verdict | None) -> tuple[dict[int, Beat], Verdict | None]:
        """Publish one's beat (rank 0: and the verdict), and give the beats that this rank follows, and the verdict."""
        if verdict is not None and self.rank == 0:
            self._store.set(_VERDICT, verdict.to_json())
        self._store.set(_key(self.rank), own.to_json())
        ranks = range(self.world_size) if self.rank == 0 else [0]
        *beats, published = self._store.multi_get([*map(_key, ranks), _VERDICT])
        heard = {other: Beat.from_json(text) for other, text in zip(ranks, beats, strict=True)}
        return heard, Verdict.from_json(published) if published else verdict


def _key(of_rank: int) -> str:
    return f"beat/{of_rank}"


def _tcp_store(address: str, port: int) -> Any:
    """Serve one where there is no address, else join it."""
    kind = dist.TCPStore  # type: ignore[attr-defined]  # not in torch's stubs
    return kind(
        address or "localhost",
        port,
        is_master=not address,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_SECONDS),
    )


def _own_address() -> str:
    """Give the address under which others reach this process: the one from which it reaches MASTER_ADDR.

    That is not always MASTER_ADDR: torchrun's may be another machine than that of rank 0. Where it leads to this very
    machine by its loopback, its name is what the others know.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        kind, *_, target = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            # Of datagrams this only chooses the route; nothing is sent.
            probe.connect(target)
            own = str(probe.getsockname()[0])
    except OSError:
        return master
    return master if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
