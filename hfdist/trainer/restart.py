"""The process group of ranks that torchrun has started again."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def start_group_after_restart() -> None:
    """Make the group before accelerate does, where torchrun has restarted the ranks (`--max-restarts`); else nothing.

    torchrun keeps its store over a restart (torch 2.13), and with it the addresses of the ranks before: gloo looks for
    its peers there, and fails with `connectFullMesh ... Connection refused`. So each restart has keys of its own.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]  # as below
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.PrefixStore(f"restart-{restart}", store)  # type: ignore[attr-defined]  # not in its stubs
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
