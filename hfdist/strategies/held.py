"""What lies in the memory of this rank: bytes of tensors, room for more, and which parameters are whole there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from hfdist.collectives import gather_json
from hfdist.strategies.gradients.reduction import local_tensor


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Give the bytes that tensors, or this rank's shards of them, take on a kind of device."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    on_device = (storage for storage in storages if storage.device.type == device.type)
    # Several tensors may be views of one storage.
    return sum({storage.data_ptr(): storage.nbytes() for storage in on_device}.values())


def have_room(num_bytes: int, device: torch.device) -> bool:
    """Whether each rank's GPU has twice as many bytes free: activations, keys and values come too. A collective.

    A CPU is taken to have them.
    """
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return all(gather_json(2 * num_bytes <= free + cached))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give all tensors of an optimizer's state."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in kept if isinstance(value, torch.Tensor)]


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 or ZeRO-3 has left this rank a part of a parameter, so that each forward gathers it."""
    status = getattr(parameter, "ds_status", None)
    return isinstance(parameter, DTensor) or (status is not None and status.name != "AVAILABLE")
