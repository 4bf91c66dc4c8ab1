"""A process group whose other ranks do not exist, and tensors without memory: the contexts of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

# Neither is public; with both, torch's own tests run layouts without processes and without memory.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hfdist.strategies.base import Strategy
from hfdist.topology import Topology


@contextmanager
def fake_ranks(topology: Topology) -> Iterator[None]:
    """Start a process group of which this process is one rank, and the others do not exist; end it after the block."""
    if topology.world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=topology.rank, world_size=topology.world_size)
    try:
        yield
    finally:
        # DeepSpeed has ended its own.
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def fake_tensors(strategy: Strategy) -> Iterator[None]:
    """Make tensors of the block without memory, but the mesh of the layout with real ones."""
    if strategy.topology.world_size > 1:
        _ = strategy.mesh
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def deepspeed_of(strategy: Strategy) -> AbstractContextManager[None]:
    """Give a context in which DeepSpeed, where the layout has it, works on fake tensors."""
    if not strategy.config.sharding.is_deepspeed:
        return nullcontext()
    # It takes a second to import, which other layouts save.
    from hfdist.planning.tracing.deepspeed_trace import deepspeed_on_fake_tensors

    return deepspeed_on_fake_tensors(strategy.topology)
