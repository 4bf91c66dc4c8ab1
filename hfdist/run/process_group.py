"""The process group of ranks that torchrun may start again, on other machines."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hfdist.topology import read_launcher


def start_group_under_torchrun(*, backend: str | None = None, timeout_seconds: int | None = None) -> None:
    """Make the group before accelerate does, where torchrun's agents keep one store for all starts; else nothing.

    In that store gloo would find the addresses of the ranks of an earlier start, and fail with `connectFullMesh ...
    Connection refused` (torch 2.13). So each start has keys of its own, which its ranks agree on: the environment does
    not tell starts apart, since TORCHELASTIC_RESTART_COUNT only counts failures, and by each agent for itself.
    The arguments are `ddp_backend` and `ddp_timeout` of TrainingArguments.
    """
    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]  # as below
    if torch.cuda.is_available():
        torch.cuda.set_device(read_launcher().local_rank)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    # The default of TrainingArguments, too; torch's own for NCCL is ten minutes.
    timeout = timedelta(seconds=timeout_seconds or 1800)
    token = agree_on_start(store, rank, world_size)
    store = dist.PrefixStore(f"start-{token}", store)  # type: ignore[attr-defined]  # not in its stubs
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def agree_on_start(store: Any, rank: int, world_size: int) -> str:
    """Give all ranks of one start the same token, though the store holds the keys of earlier ones.

    Each rank asks rank 0 under a name that nobody had before, and waits for the answer to that name. Rank 0 answers
    whatever name stands there, an old one as well, which nobody reads, until each rank has thanked for the answer.
    """
    token = secrets.token_hex(8)
    if rank != 0:
        store.set(f"asks-{rank}", token)
        answer = str(store.get(f"answer-{token}").decode())
        store.set(f"thanks-{answer}-{rank}", "")
        return answer
    answered: dict[int, bytes] = {}
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"thanks-{token}-{other}"]):
                missing.remove(other)
            elif store.check([f"asks-{other}"]) and answered.get(other) != (name := store.get(f"asks-{other}")):
                answered[other] = name
                store.set(f"answer-{name.decode()}", token)
        time.sleep(0.02 if missing else 0)
    return token
