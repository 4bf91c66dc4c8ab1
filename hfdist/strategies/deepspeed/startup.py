"""DeepSpeed's import and start, without what takes long and no run needs."""

from __future__ import annotations

import importlib
import os
import sys

import torch
import torch.distributed as dist


def import_deepspeed() -> None:
    """Import it before accelerate does, whatever the layout, and without MLflow: a sixth of all imports of a run.

    Its module of autotuning, which runs of hfdist never use, imports MLflow where that is installed. None in the table
    of modules is Python's way to say that there is none; a tracker of the run imports it afterwards as ever.
    """
    if "deepspeed" in sys.modules or "mlflow" in sys.modules:
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed")
    finally:
        del sys.modules["mlflow"]


def start_deepspeed() -> None:
    """Let DeepSpeed take over the process group, or make one of this process alone."""
    import deepspeed

    if not torch.cuda.is_available():
        # On a CPU, DeepSpeed compiles a shared-memory all-reduce for half a minute, which only its inference
        # calls, and leaves its 66 MiB a rank in /dev/shm. An empty table of what could be compiled also
        # spares the trial compilations that would fill it.
        deepspeed.ops.__compatible_ops__ = {}
    if not dist.is_initialized():
        # One process without a launcher: DeepSpeed would look for MPI, and for the launcher's LOCAL_RANK.
        os.environ.setdefault("LOCAL_RANK", "0")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in its stubs
    deepspeed.init_distributed(verbose=False)
