"""Groups of parameters of an optimizer."""

from __future__ import annotations

import torch


def without_empty_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Drop groups without parameters, in place, but for one: DeepSpeed does so later, when the schedule counts them."""
    groups = optimizer.param_groups
    groups[:] = [group for group in groups if group["params"]] or groups[:1]
    return optimizer
