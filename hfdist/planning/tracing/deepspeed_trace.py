"""A step of DeepSpeed's own engine on fake tensors, as one rank of a process group of which no other rank exists.

So each bucket and each flat buffer is seen when DeepSpeed holds it. Where DeepSpeed asks a fake tensor for a value (a
norm, whether something overflowed), it gets a harmless one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage3, utils
from torch import nn

# Not public; see fake_ranks.py.
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.planning.tracing.as_trainer import prepare_as_trainer
from hfdist.planning.tracing.fake_operations import Arguments, Named, Operation
from hfdist.planning.tracing.fake_task import FakeTask
from hfdist.planning.tracing.trace import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, Trace
from hfdist.strategies.deepspeed.deepspeed_config import QUANTIZED
from hfdist.strategies.deepspeed.flat_buffers import stepped_buffers
from hfdist.strategies.deepspeed.startup import start_deepspeed
from hfdist.strategies.deepspeed.zero import ZeroStrategy
from hfdist.strategies.engine import Batch, Engine
from hfdist.strategies.gradients.reduction import local_tensor
from hfdist.strategies.held import state_tensors
from hfdist.strategies.pipelines import zero as pipelines_zero
from hfdist.strategies.step_memory import MemoryUse
from hfdist.strategies.traffic import Phase
from hfdist.topology import Topology

if TYPE_CHECKING:
    from hfdist.strategies.deepspeed.flat_buffers import ZeroOptimizer

_aten = torch.ops.aten
_MICROBATCHES = 2
"""Enough for gradients that wait while another micro batch is computed."""


class _Values(TorchDispatchMode):
    """Answers for the values that fake tensors lack: a norm is 1, nothing overflows, all tensors are equal."""

    def __torch_dispatch__(
        self, operation: Operation, types: tuple[type, ...], args: Arguments = (), kwargs: Named | None = None
    ) -> object:
        if operation is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0
        if operation is _aten.equal.default and FakeTensor in types:
            return True
        return operation(*args, **(kwargs or {}))


class _Addresses(TorchFunctionMode):
    """Gives 0, an aligned address, as the address of each fake tensor: it has no memory."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Named | None = None,
    ) -> object:
        if function is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return 0
        return function(*args, **(kwargs or {}))


@contextmanager
def deepspeed_on_fake_tensors(topology: Topology) -> Iterator[None]:
    """Start DeepSpeed in the fake process group, or in one of this rank alone; at the end that group is gone."""
    rank, world_size = topology.rank, topology.world_size
    places = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    # Private functions of ZeRO-3: with these two it compares what it gathers with rank 0, which does not exist here.
    without_rank0: Any = {
        "assert_lst_len_same_as_other_ranks": lambda _: None,
        "get_lst_from_rank0": lambda numbers: numbers,
    }
    # float16 is for GPUs, and a plan may be of one. Nothing fake can be pinned.
    as_on_gpu: Any = {"is_fp16_supported": lambda: True, "pin_memory": lambda tensor, **_: tensor}
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with (
        patch.dict(os.environ, places),
        patch.multiple(utils, **without_rank0),
        patch.multiple(get_accelerator(), **as_on_gpu),
        patch.object(stage3, "reduce_scatter_coalesced", _reduce_scatter),
        # ZeRO-3 replaces this function by its own, and does not put it back: `patch` does.
        patch.object(nn.functional, "linear", nn.functional.linear),
        # There is only one device. And torch cannot replace fake parameters to which something else refers.
        patch.object(nn.Module, "to", lambda module, *_, **__: module),
        # accelerate's wrapper of the optimizer refuses to work without an Accelerator.
        patch.object(pipelines_zero, "DeepSpeedOptimizerWrapper", lambda optimizer: optimizer),
        # DeepSpeed would warn here of what the run will warn of.
        patch.object(logging.getLogger("DeepSpeed"), "disabled", True),
        _Values(),
        _Addresses(),
    ):
        start_deepspeed()
        try:
            yield
        finally:
            # If only torch's own were destroyed, DeepSpeed would keep its groups for the next plan, or the run.
            deepspeed.comm.destroy_process_group()


def _reduce_scatter(tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Give this rank's share of each gradient, in as much memory as DeepSpeed's own function holds.

    DeepSpeed's own cuts each gradient once for each rank: with thousands of ranks that takes minutes.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shares = [math.ceil(tensor.numel() / size) for tensor in tensors]
    is_even = len(tensors) == 1 and tensors[0].numel() % size == 0
    flat = tensors[0].view(-1) if is_even else tensors[0].new_empty(size * sum(shares))
    flat.div_(size)
    own = flat.chunk(size)[rank]
    dist.reduce_scatter_tensor(own, flat, group=group)
    lengths = [min(share, max(0, tensor.numel() - rank * share)) for share, tensor in zip(shares, tensors, strict=True)]
    return [part[:length] for part, length in zip(own.split(shares), lengths, strict=True)]


def trace_deepspeed(
    config: RunConfig,
    strategy: ZeroStrategy,
    engine: Engine,
    *,
    task: FakeTask,
    make_optimizer: Callable[[], torch.optim.Optimizer],
    trace: Trace,
) -> MemoryUse:
    """Trace a later step of a ZeRO engine; call it in `deepspeed_on_fake_tensors`.

    Args:
        config: the run's config.
        strategy: the strategy whose config DeepSpeed reads.
        engine: the engine that `strategy.build` has given.
        task: the batches and the loss of the run.
        make_optimizer: makes the optimizer of the engine's model.
        trace: the trace that counts what the step holds and costs.

    Returns:
        The memory that the rank holds between steps, in bytes by kind.
    """
    model = engine.model
    # DeepSpeed casts the weights themselves.
    as_it_is = dataclasses.replace(config.train, precision=Precision.fp32)
    prepare_as_trainer(model, dataclasses.replace(config, train=as_it_is))
    optimizer = make_optimizer()
    with trace:
        teacher = map(local_tensor, task.teacher_tensors())
        trace.hold((*model.parameters(), *model.buffers(), *teacher), WEIGHTS)
        # Tensors of the CPU stand for those of a GPU, and there is no kernel that quantizes them.
        whole = {"zero_optimization": strategy.deepspeed_config["zero_optimization"] | dict.fromkeys(QUANTIZED, False)}
        prepared, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=strategy.deepspeed_config | whole)
        engine.setup(prepared, SimpleNamespace(optimizer=optimizer), None)
        _name_buckets(prepared.optimizer, trace)
        batch = task.batch(config.train.micro_batch_size)
        num_microbatches = min(_MICROBATCHES, strategy.batch.num_microbatches)
        # The first makes the optimizer's state.
        for number in (1, num_microbatches):
            name_what_is_held(engine, prepared, trace)
            state = trace.held
            trace.forget_peak()
            _run_step(prepared, batch, task, trace, num_microbatches=number)
    return state


def name_what_is_held(engine: Engine, prepared: deepspeed.DeepSpeedEngine, trace: Trace) -> None:
    """Tell the trace which memory is weights, optimizer state or buffers between two steps."""
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.model.parameters()]
    zero = prepared.optimizer
    trace.hold_rest(BUFFERS)
    trace.hold((*stepped_buffers(zero), *state_tensors(zero.optimizer)), OPTIMIZER)
    trace.hold((*weights, *engine.model.buffers()), WEIGHTS)


def _name_buckets(zero: ZeroOptimizer, trace: Trace) -> None:
    """Tell the trace of the buckets that ZeRO-1 and 2 make anew in each backward, and of gradients that are kept."""
    if not hasattr(zero, "setup_buckets"):
        return
    make_buckets, keep_gradient = zero.setup_buckets, zero.copy_grads_in_partition

    def make_and_name() -> None:
        make_buckets()
        trace.hold((tensor for bucket in zero.ipg_buckets.values() for tensor in bucket.buffer), BUFFERS)

    def keep_and_name(*arguments: object) -> None:
        keep_gradient(*arguments)
        if zero.grads_in_partition is not None:
            trace.hold([zero.grads_in_partition], GRADIENTS)

    zero.setup_buckets, zero.copy_grads_in_partition = make_and_name, keep_and_name


def _run_step(
    prepared: deepspeed.DeepSpeedEngine,
    batch: Batch,
    task: FakeTask,
    trace: Trace,
    *,
    num_microbatches: int,
) -> None:
    """Run a step as accelerate does; of many micro batches, the first and the last."""
    num_items = task.count(batch)
    for microbatch in range(num_microbatches):
        is_last = microbatch == num_microbatches - 1
        if is_last:
            trace.forget_costs()
        trace.phase = Phase.forward
        loss = task.loss(prepared, batch, num_items)
        trace.phase = Phase.backward
        prepared.set_gradient_accumulation_boundary(is_last)
        prepared.backward(loss)
        del loss
        if is_last:
            trace.phase = Phase.optimizer
            prepared.step()
            task.compute_once()
    trace.phase = Phase.forward
