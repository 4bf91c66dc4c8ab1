"""Lets DeepSpeed's own engine run on fake tensors, as one rank of a process group of which no other rank exists.

A plan runs what a run would run, so that it sees each bucket and each flat buffer when DeepSpeed holds it. Where
DeepSpeed asks for a value that a fake tensor lacks (a norm, whether something overflowed), it gets a harmless one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Neither is public; with both, torch's own tests run layouts without processes and without memory.
from torch._subclasses.fake_tensor import FakeTensor
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hfdist.strategies.deepspeed.zero import start_deepspeed

_aten = torch.ops.aten


class _Values(TorchDispatchMode):
    """Gives what DeepSpeed asks a fake tensor for: a norm of 1, no overflow, and equal values everywhere."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0
        if operation is _aten.equal.default and FakeTensor in types:
            return True
        return operation(*args, **(kwargs or {}))


class _Addresses(TorchFunctionMode):
    """Gives an aligned address for what has none."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return 0
        return function(*args, **(kwargs or {}))


@contextmanager
def deepspeed_on_fake_tensors(rank: int, world_size: int) -> Iterator[None]:
    """Start DeepSpeed in the fake process group, or in one of this rank alone; at the end that group is gone.

    Enter it in a FakeTensorMode.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import utils

    places = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    # Private: by these two ZeRO-3 compares what it gathers with rank 0, which is not there.
    alike = {"assert_lst_len_same_as_other_ranks": lambda _: None, "get_lst_from_rank0": lambda numbers: numbers}
    # float16 is for GPUs, and a plan may be of one.
    supports = {"is_fp16_supported": lambda: True}
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with (
        patch.dict(os.environ, places),
        patch.multiple(utils, **alike),
        patch.multiple(get_accelerator(), **supports),
        # There is one device, and torch cannot replace fake parameters that are referred to.
        patch.object(nn.Module, "to", lambda module, *_: module),
        _Values(),
        _Addresses(),
    ):
        start_deepspeed()
        try:
            yield
        finally:
            # Behind torch's own, DeepSpeed would keep its groups for the next plan, or the run.
            deepspeed.comm.destroy_process_group()
