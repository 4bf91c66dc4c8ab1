"""The learning rate of a group of parameters: a number, or a tensor that the optimizer's step reads."""

from __future__ import annotations

import torch

from hfdist.optim.joined import Group


def rate_of(group: Group) -> float:
    """Give the rate as a number, which stays when the group's changes."""
    return float(group["lr"])


def set_rate(group: Group, rate: float) -> None:
    """Set the rate as torch's schedules do: a tensor stays the one that it is."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
