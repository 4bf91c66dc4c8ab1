"""The device mesh of a layout."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hfdist.collectives import device_of
from hfdist.topology import Topology


def build_mesh(topology: Topology) -> DeviceMesh:
    """Give the device mesh of the layout: `mesh.get_group("pipeline")` and so on. A collective over all ranks.

    Besides its own axes it has `data`: replicate and shard together; `sharded`: shard and context together, over which
    FSDP2 shards, as each rank of a context group has other gradients; and `tokens`: all three, whose ranks each have
    other tokens of the global batch. With tensor parallelism `sharded_parts` are the ranks that together have a matrix.

    With expert parallelism `shard` is `expert_shard` and `expert` together: neighbours hold other experts. The ranks
    with the same experts are `sharded_experts` and `tokens_of_experts`, in place of `sharded` and `tokens`.
    """
    shape = topology.mesh_shape
    mesh = init_device_mesh(device_of(None).type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    # Not public yet, and the way that torch's own documentation shows.
    shard: tuple[str, ...] = ("shard",)
    if topology.expert > 1:
        shard = ("expert_shard", "expert")
        mesh[shard]._flatten("shard")
        mesh["expert_shard", "context"]._flatten("sharded_experts")
        mesh["replicate", "expert_shard", "context"]._flatten("tokens_of_experts")
    mesh["replicate", *shard]._flatten("data")
    mesh[*shard, "context"]._flatten("sharded")
    if topology.tensor > 1:
        mesh[*shard, "context", "tensor"]._flatten("sharded_parts")
    mesh["replicate", *shard, "context"]._flatten("tokens")
    return mesh
