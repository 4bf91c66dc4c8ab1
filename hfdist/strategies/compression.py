"""Gradients of DDP that travel in fewer bytes, by hooks of torch's; what is left behind comes with a later step.

A hook gets a bucket of gradients, and gives their average over all ranks, the same on each rank.
"""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook themselves.

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hfdist.config.strategy import Compression, StrategyConfig

_Future = torch.futures.Future[torch.Tensor]


@dataclass
class _Largest:
    share: float
    steps_left: int
    """In which all is sent."""
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    """What was not sent yet, by bucket."""


def compress_gradients(model: DistributedDataParallel, config: StrategyConfig) -> None:
    """Let the gradients of a model travel as `strategy.compression` says; before its first backward."""
    warm_up_steps = config.compression_warmup_steps
    hooks: dict[Compression, tuple[Any, Callable[..., _Future]]] = {
        Compression.fp16: (torch.float16, _send_rounded),
        Compression.bf16: (torch.bfloat16, _send_rounded),
        Compression.powersgd: (
            PowerSGDState(None, matrix_approximation_rank=config.compression_rank, start_powerSGD_iter=warm_up_steps),
            _send_factors,
        ),
        Compression.topk: (_Largest(config.compression_share, warm_up_steps), _send_largest),
    }
    state, hook = hooks[config.compression]
    model.register_comm_hook(state, hook)


def _send_rounded(kind: torch.dtype, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # not in torch's stubs
    """As numbers of 16 bits."""
    # By its own name DDP takes that of bf16 for NCCL's alone, which was true before gloo had this type.
    hook = default_hooks.fp16_compress_hook if kind is torch.float16 else default_hooks.bf16_compress_hook
    return hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def _send_factors(state: PowerSGDState, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # as above
    """As two narrow matrices whose product is near the gradient of a matrix (PowerSGD)."""
    index = bucket.index()
    sent = powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        # Each bucket has several collectives, which start from threads: ranks would start those of two buckets in
        # different orders, and gloo aborts.
        sent.wait()
        if not torch.isfinite(sent.value()).all():
            # All ranks see it, and leave the step out. What they keep would never be finite again.
            for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.pop(index, None)
    return sent


def _send_largest(state: _Largest, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # as above
    """As the entries of the largest size, each with its place; the rest is added to the next step's."""
    index, buffer = bucket.index(), bucket.buffer()
    is_warming_up = state.steps_left > 0
    if bucket.is_last():
        state.steps_left -= 1
    if is_warming_up:
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks
    residual = state.residuals.get(index)
    total = buffer.clone() if residual is None else buffer + residual
    count, num_ranks = max(1, int(state.share * total.numel())), dist.get_world_size()
    places = total.abs().topk(count, sorted=False).indices
    values = total[places]
    if torch.isfinite(total).all():
        # Else the step is left out.
        state.residuals[index] = total.index_fill_(0, places, 0)
    every_values = values.new_empty(num_ranks * count)
    every_places = torch.empty(num_ranks * count, dtype=torch.int32, device=values.device)
    dist.all_gather_single(every_values, values)
    dist.all_gather_single(every_places, places.int())
    # In order of rank: the sum is the same on all of them.
    buffer.zero_().index_add_(0, every_places.long(), every_values.div_(num_ranks))
    done: _Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done
