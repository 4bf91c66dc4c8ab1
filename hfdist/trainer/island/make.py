"""The island that a Trainer is, by its method."""

from __future__ import annotations

from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.island.callback import IslandCallback
from hfdist.trainer.island.parameter_island import ParameterIsland, ServerOptimizer
from hfdist.trainer.island.round_island import RoundIsland
from hfdist.trainer.training import Training


def make_island(
    training: Training, checkpointer: Checkpointer, config: IslandsConfig, server: ServerOptimizer | None
) -> IslandCallback:
    """Make the callback of an island by its method; `server`: settings of a parameter server, if there is one."""
    if config.method is not IslandMethod.parameter_server:
        return RoundIsland(training, checkpointer, config)
    assert server is not None
    return ParameterIsland(training, checkpointer, config, server)
