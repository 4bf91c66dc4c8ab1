"""Bytes that tensors hold: each storage once, however many views it has."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hfdist.strategies.gradients.reduction import local_tensor


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Give the bytes that tensors, or this rank's shards of them, take on a kind of device."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.device.type == device.type}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give all tensors of an optimizer's state."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in kept if isinstance(value, torch.Tensor)]
