"""Strategies of so many processes, for tests that start none."""

from __future__ import annotations

from typing import Any

from hfdist.config.batch import plan_batch
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import select_strategy


def make_layout(
    world_size: int,
    train: TrainConfig,
    *,
    num_microbatches: int = 1,
    micro_batch_size: int = 1,
    sequence_length: int = 64,
    **keys: Any,
) -> Strategy:
    """Give the strategy of rank 0, by the keys of `strategy.*`."""
    config = StrategyConfig(**keys)
    topology = config.topology(world_size)
    batch = plan_batch(
        global_batch_size=num_microbatches * micro_batch_size * topology.data,
        micro_batch_size=micro_batch_size,
        data_size=topology.data,
        sequence_length=sequence_length,
        lanes=topology.data,
    )
    return select_strategy(config, train, topology=topology, batch=batch, device_type="cpu")
