"""The one place that turns the config's choice of layout into a strategy."""

from __future__ import annotations

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.strategies.base import Strategy
from hfdist.strategies.replicated import ReplicatedStrategy
from hfdist.strategies.zero import ZeroStrategy
from hfdist.topology import Topology


def select_strategy(strategy: StrategyConfig, train: TrainConfig, *, topology: Topology, batch: BatchPlan) -> Strategy:
    """Give the strategy that `strategy.*` asks for.

    Raises:
        ConfigError: keys that the strategy itself checks, such as those of `strategy.deepspeed`.
    """
    match strategy.sharding:
        case Sharding.none:
            return ReplicatedStrategy(topology, batch)
        case Sharding.zero1 | Sharding.zero2 | Sharding.zero3:
            return ZeroStrategy(topology, batch, strategy, train)
