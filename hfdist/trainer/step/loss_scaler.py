"""A loss scale whose verdict on overflow is that of all ranks: each may hold another part of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class SyncedLossScaler(torch.amp.GradScaler):
    """torch's, with the verdict shared. Every rank must unscale in every step.

    FSDP's own shares it too, but its verdict has a shape that fused Adam refuses.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and note whether any rank's have overflowed."""
        super().unscale_(optimizer)
        # Private, but also where optimizers with a scale of their own look.
        verdicts: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
        if not verdicts:
            # A rank whose parameters are all frozen still takes part.
            assert self._scale is not None
            verdicts[self._scale.device] = torch.zeros((), device=self._scale.device)
        if dist.is_initialized():
            for verdict in verdicts.values():
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
