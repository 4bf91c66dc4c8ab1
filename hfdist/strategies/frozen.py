"""Another model that is not trained, sharded by FSDP2 over the ranks that run it at the same time."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from hfdist.config.strategy import Offload
from hfdist.config.task import TeacherSharding
from hfdist.strategies.base import Strategy
from hfdist.strategies.fsdp_units import shard_model


def shard_frozen(model: PreTrainedModel, layout: Strategy, sharding: TeacherSharding) -> None:
    """Leave this rank's part of a whole model, in place: of all data and tensor ranks of its stage, or a replica group.

    Tensor ranks run it on the same rows. Stages of a pipeline run at other times, so each shares by itself. Each of its
    forwards is a collective then, without gradients. A collective over those ranks.
    """
    if layout.ranks_of_frozen(sharding) > 1:
        # No block stays whole for a backward.
        config = replace(layout.config, offload=Offload.none, reshard=True)
        shard_model(model, layout.mesh, config, axis="sharded_parts" if layout.topology.tensor > 1 else "sharded")
