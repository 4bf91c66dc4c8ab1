"""Process groups along the axes of the layout."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hfdist.topology import Topology


def build_mesh(topology: Topology) -> DeviceMesh:
    """Give the device mesh of the layout: `mesh.get_group("data")` and so on. A collective over all ranks."""
    device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    shape = topology.mesh_shape
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
