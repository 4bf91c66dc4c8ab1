"""The one place that turns the config's choice of layout into a strategy."""

from __future__ import annotations

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.strategies.base import Strategy
from hfdist.strategies.pipeline import PipelineStrategy
from hfdist.strategies.pipeline_zero import PipelineZeroStrategy
from hfdist.strategies.replicated import ReplicatedStrategy
from hfdist.strategies.zero import ZeroStrategy
from hfdist.topology import Topology


def select_strategy(strategy: StrategyConfig, train: TrainConfig, *, topology: Topology, batch: BatchPlan) -> Strategy:
    """Give the strategy that `strategy.*` asks for.

    Raises:
        ConfigError: keys that the strategy itself checks, such as those of `strategy.deepspeed`.
    """
    has_pipeline = strategy.pipeline > 1
    match strategy.sharding:
        case Sharding.none if has_pipeline:
            return PipelineStrategy(topology, batch, strategy, train)
        case Sharding.none:
            return ReplicatedStrategy(topology, batch)
        case Sharding.zero1 if has_pipeline:
            return PipelineZeroStrategy(topology, batch, strategy, train)
        case Sharding.zero1 | Sharding.zero2 | Sharding.zero3:
            return ZeroStrategy(topology, batch, strategy, train)
