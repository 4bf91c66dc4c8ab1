"""What a new accelerator does otherwise with a strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedType

from hfdist.topology import Topology
from hfdist.trainer.step.lean_optimizer import prepare_optimizer
from hfdist.trainer.step.sharded_dataloader import prepare_for_data_ranks


def adapt_accelerator(accelerator: Accelerator, topology: Topology, uses_all_parameters: Callable[[], bool]) -> None:
    """Change what a new accelerator does otherwise than a strategy wants.

    `uses_all_parameters` says whether each step's loss is known to need all parameters, where the user leaves it open.
    """
    # The cache keeps copies of all weights that a forward has gathered until it ends, also where blocks run again.
    accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    handler = accelerator.ddp_handler
    if handler is not None:
        if handler.find_unused_parameters and uses_all_parameters():
            # DDP would walk through the graph at each forward, and say itself that there is nothing to find.
            handler.find_unused_parameters = False
        # DDP would hold gradients twice, as they are and in its buckets, and copy them to and fro.
        handler.gradient_as_bucket_view = True
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # The Trainer accumulates by itself and tells accelerate of one step, of which DeepSpeed's config has the truth.
        accelerator.gradient_accumulation_steps = accelerator.deepspeed_plugin.get_value("gradient_accumulation_steps")
    elif accelerator.mixed_precision == "fp16":
        # On a CPU it drops fp16 without a word: give it what a GPU gets.
        accelerator.native_amp = True
        accelerator.scaler = SyncedLossScaler(accelerator.device.type)
    accelerator.prepare_optimizer = partial(prepare_optimizer, accelerator)
    if topology.data < accelerator.num_processes:
        # accelerate shares batches out to all processes, but ranks of one model replica must read the same.
        accelerator.prepare_data_loader = partial(
            prepare_for_data_ranks, accelerator, num_ranks=topology.data, rank=topology.data_rank
        )


class SyncedLossScaler(torch.amp.GradScaler):
    """torch's, but all ranks skip a step whose gradients overflow on any: each may hold another part of the model.

    Every rank must unscale in every step. FSDP's own does so, too, but its flag has a shape that fused Adam refuses.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and note whether any rank's have overflowed."""
        super().unscale_(optimizer)
        # A private attribute, where optimizers with a scale of their own look, too.
        flags: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
        if not flags:
            # A rank whose parameters are all frozen still takes part.
            assert self._scale is not None
            flags[self._scale.device] = torch.zeros((), device=self._scale.device)
        if dist.is_initialized():
            for flag in flags.values():
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
