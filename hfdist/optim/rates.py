"""The learning rate of a group of parameters: a number, or a tensor that the optimizer's step reads."""

from __future__ import annotations

import torch

from hfdist.optim.joined import Group


def rate_of(group: Group) -> float:
    """Give the present learning rate of a group as a number; later changes of the group do not change it."""
    return float(group["lr"])


def set_rate(group: Group, rate: float) -> None:
    """Set the learning rate of a group as torch's schedules do: a tensor is filled, and stays the same object."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
