"""A loss scale whose verdict on overflow is that of all ranks: each may hold another part of the model."""

from __future__ import annotations

import torch
import torch.distributed as dist


class AgreedLossScaler(torch.amp.GradScaler):
    """torch's, with the verdict shared. Every rank must unscale in every step.

    FSDP's own shares it too, but its verdict has a shape that fused Adam refuses.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and note whether any rank's have overflowed."""
        super().unscale_(optimizer)
        if dist.is_initialized():
            # Private, but also where optimizers with a scale of their own look.
            for verdict in self._found_inf_per_device(optimizer).values():
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
