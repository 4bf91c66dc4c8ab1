"""A frozen model beside the trained one, sharded by FSDP2 over the ranks that run it at the same time."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from hfdist.collectives import device_of
from hfdist.config.strategy import Offload
from hfdist.config.task import TeacherSharding
from hfdist.strategies.base import Strategy
from hfdist.strategies.fsdp_units import shard_model


def shard_frozen(model: PreTrainedModel, layout: Strategy, sharding: TeacherSharding, *, by_all: bool = False) -> None:
    """Leave this rank's part of a whole frozen model in it, in place; it stays whole if `sharding` says so.

    The ranks that share it are the data and tensor ranks of a pipeline stage, within a replica group; the stages of a
    pipeline run it at other times. With `by_all` all ranks run it together, and share it. This call and each forward
    of the model are collectives over the ranks that share it.

    Args:
        model: whole, and the same on all ranks.
        layout: the strategy of the trained model.
        sharding: how the user wants the weights shared.
        by_all: whether all ranks run the model at the same time.
    """
    num_ranks = layout.ranks_of_frozen(sharding, by_all=by_all)
    if num_ranks == 1:
        return
    # There is no backward for which a block could stay whole.
    config = replace(layout.config, offload=Offload.none, reshard=True)
    if by_all:
        names = ("replicate", "sharded")
        mesh = init_device_mesh(device_of(None).type, (1, num_ranks), mesh_dim_names=names)
        shard_model(model, mesh, config)
    else:
        shard_model(model, layout.mesh, config, axis="sharded_parts" if layout.topology.tensor > 1 else "sharded")
