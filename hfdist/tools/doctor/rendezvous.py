"""The store at which the ranks of an examination meet, within a time limit, and leave JSON for each other.

    rank 1   tell("facts", ...)  -->  store on rank 0, or of the launcher  -->  hear("facts", 1)   rank 0

They do not meet in one process group: gloo needs all links for it, and fails on all ranks if one link is cut.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hfdist.errors import ResourceError, first_line
from hfdist.launch.gloo_interface import VARIABLE, choose_gloo_interface
from hfdist.messages.message import NotAMessageError, read_json
from hfdist.topology import LauncherPlace

JOIN_SECONDS = 60.0
"""Seconds that all ranks have to come."""


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
        # torchrun's agent may serve the store at this address already.
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
        """Leave a value under a name for the other ranks, as JSON."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def hear(self, name: str, rank: int, seconds: float) -> Any:
        """Wait for the value that a rank leaves under a name; give None if there is none after so many seconds."""
        key = f"{name}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            return read_json(self._store.get(key))
        except (RuntimeError, NotAMessageError):
            return None

    def hear_all(self, name: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Wait for the values that several ranks leave under a name, and give those that have come, by rank.

        `seconds` is the time limit for all of them together.
        """
        deadline = time.monotonic() + seconds
        heard = {rank: self.hear(name, rank, deadline - time.monotonic()) for rank in ranks}
        return {rank: value for rank, value in heard.items() if value is not None}

    @contextmanager
    def group(self, name: str, backend: str, ranks: Sequence[int], seconds: float) -> Iterator[None]:
        """Make a process group of these ranks the default one during the block.

        Args:
            name: a name that no other group has.
            backend: `gloo` or `nccl`.
            ranks: ranks of the group, this one among them.
            seconds: time limit for its start, and for each call.
        """
        limit = timedelta(seconds=seconds)
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]  # as above
        rank_in_group = list(ranks).index(self.rank)
        try:
            dist.init_process_group(backend, store=store, rank=rank_in_group, world_size=len(ranks), timeout=limit)
            yield
        finally:
            if dist.is_initialized():
                _end_group(backend)


def meet(place: LauncherPlace) -> Rendezvous:
    """Join the other ranks at the store. ResourceError: this rank does not reach it."""
    if not os.environ.get(VARIABLE):
        # Each run chooses it in this way: so the links of a run are tried.
        choose_gloo_interface()
    begun = time.monotonic()
    try:
        return Rendezvous(place)
    except ResourceError:
        if place.rank != 0:
            # A launcher ends all ranks as soon as one has failed: rank 0 first says who is missing.
            time.sleep(max(0.0, JOIN_SECONDS + 10 - (time.monotonic() - begun)))
        raise


def _end_group(backend: str) -> None:
    """End the default group, whatever has failed in it; the next pair must be tried all the same."""
    with suppress(Exception):
        if backend == "nccl":
            # A group of NCCL that has failed would wait for its other rank.
            group = dist.distributed_c10d._get_default_group()
            group._get_backend(torch.device("cuda")).abort()
    with suppress(Exception):
        dist.destroy_process_group()
