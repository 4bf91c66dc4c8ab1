"""The one place that turns a choice of layout into a strategy."""

from __future__ import annotations

import torch

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.strategies.base import Strategy
from hfdist.topology import Topology


def select_strategy(
    strategy: StrategyConfig, train: TrainConfig, *, topology: Topology, batch: BatchPlan, device_type: str
) -> Strategy:
    """Give the strategy that `strategy.*` asks for.

    Args:
        strategy: the keys of `strategy.*`.
        train: the keys of `train.*`.
        topology: degrees and place of this process, or of one that is planned.
        batch: the batch of a step.
        device_type: `cpu` or `cuda`: where the run is to be.

    Raises:
        ConfigError: keys that the strategy itself checks, such as those of `strategy.deepspeed`.
    """
    has_pipeline = strategy.pipeline > 1
    # Each imported where it is chosen: torch's pipelining and DeepSpeed's checks take time that other layouts save.
    match strategy.sharding:
        case Sharding.none if has_pipeline:
            from hfdist.strategies.pipelines.pipeline import PipelineStrategy

            return PipelineStrategy(topology, batch, strategy, train)
        case Sharding.none:
            return Strategy(topology, batch, strategy)
        case Sharding.zero1 if has_pipeline:
            from hfdist.strategies.pipelines.zero import PipelineZeroStrategy

            return PipelineZeroStrategy(topology, batch, strategy, train, device_type=device_type)
        case Sharding.zero1 | Sharding.zero2 | Sharding.zero3:
            from hfdist.strategies.deepspeed.zero import ZeroStrategy

            return ZeroStrategy(topology, batch, strategy, train, device_type=device_type)
        case Sharding.fsdp2 if has_pipeline:
            from hfdist.strategies.pipelines.fsdp import PipelineFsdpStrategy

            return PipelineFsdpStrategy(topology, batch, strategy, train)
        case Sharding.fsdp2:
            from hfdist.strategies.fsdp import FsdpStrategy

            return FsdpStrategy(topology, batch, strategy)


def device_type_here() -> str:
    """Give where a run of this process is: `cuda` if it sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"
