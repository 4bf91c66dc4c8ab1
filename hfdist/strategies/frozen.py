"""Another model that is not trained, sharded by FSDP2 over the ranks that run it at the same time."""

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
    """Leave this rank's part of a whole model, in place: of all data and tensor ranks of its stage, or a replica group.

    Tensor ranks run it on the same rows. Stages of a pipeline run at other times, so each shares by itself; but for
    `by_all`, where all ranks run it together. Each of its forwards is a collective then, without gradients. A
    collective over those ranks.
    """
    num_ranks = layout.ranks_of_frozen(sharding, by_all=by_all)
    if num_ranks == 1:
        return
    # No block stays whole for a backward.
    config = replace(layout.config, offload=Offload.none, reshard=True)
    if by_all:
        names = ("replicate", "sharded")
        mesh = init_device_mesh(device_of(None).type, (1, num_ranks), mesh_dim_names=names)
        shard_model(model, mesh, config)
    else:
        shard_model(model, layout.mesh, config, axis="sharded_parts" if layout.topology.tensor > 1 else "sharded")
