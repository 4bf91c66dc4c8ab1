"""What the layout must satisfy: degrees, sharding and pipeline together."""

from __future__ import annotations

from hfdist.config.strategy import Offload, Sharding, StrategyConfig
from hfdist.config.train import Compile, TrainConfig
from hfdist.errors import ConfigError

AVAILABLE_AXES = frozenset({"data", "pipeline"})
"""Axes of the layout that this version builds; the others are refused with a word."""


def check_layout(strategy: StrategyConfig, train: TrainConfig) -> None:
    """Check the degrees, what is sharded, and the pipeline.

    Raises:
        ConfigError: the first contradiction that is found.
    """
    _check_sharding(strategy)
    _check_axes(strategy)
    _check_pipeline(strategy, train)


def _check_sharding(strategy: StrategyConfig) -> None:
    if strategy.data is not None and strategy.data < strategy.min_data:
        raise ConfigError(
            "fewer data ranks than the strategy wants at least",
            where="strategy.data",
            found=f"{strategy.data}, with strategy.min_data={strategy.min_data}",
            hint=f"strategy.min_data={strategy.data}",
        )
    if strategy.sharding is Sharding.none and strategy.offload is not Offload.none:
        raise ConfigError(
            "offloading is a part of ZeRO; without sharding there is nothing that does it",
            where="strategy.offload",
            found=f"{strategy.offload.value}, with strategy.sharding=none",
            allowed="none",
            hint="strategy=zero3_offload, or strategy.offload=none",
        )
    if strategy.sharding is Sharding.none and strategy.deepspeed:
        raise ConfigError(
            "these keys are DeepSpeed's, and without sharding DeepSpeed is not used",
            where="strategy.deepspeed",
            found=", ".join(map(str, strategy.deepspeed)),
            hint="strategy=zero1, or leave strategy.deepspeed empty",
        )
    if strategy.sharding in (Sharding.zero2, Sharding.zero3) and strategy.pipeline > 1:
        raise ConfigError(
            f"{strategy.sharding.value} and a pipeline exclude each other: ZeRO-2 and 3 cut the gradients after each "
            "micro batch, a pipeline needs those of all micro batches until it is flushed",
            where="strategy.sharding",
            found=f"{strategy.sharding.value}, with strategy.pipeline={strategy.pipeline}",
            allowed="none, zero1",
            hint="strategy.sharding=zero1",
        )


def _check_pipeline(strategy: StrategyConfig, train: TrainConfig) -> None:
    if strategy.pipeline == 1:
        for name in ("stages_per_rank", "blocks_per_stage"):
            if getattr(strategy, name) is not None:
                raise ConfigError(
                    "this key is of a pipeline, and there is none",
                    where=f"strategy.{name}",
                    found=f"{getattr(strategy, name)}, with strategy.pipeline=1",
                    hint=f"strategy.pipeline=2, or strategy.{name}=null",
                )
    elif strategy.offload is not Offload.none:
        raise ConfigError(
            "a pipeline's optimizer state stays on the device",
            where="strategy.offload",
            found=f"{strategy.offload.value}, with strategy.pipeline={strategy.pipeline}",
            allowed="none",
            hint="strategy.offload=none; strategy.sharding=zero1 cuts the state over the data ranks",
        )
    elif train.compile is Compile.model:
        raise ConfigError(
            "a pipeline runs the model from block to block, so it cannot be compiled as a whole",
            where="train.compile",
            found=f"model, with strategy.pipeline={strategy.pipeline}",
            allowed="none, blocks",
            hint="train.compile=blocks",
        )


def _check_axes(strategy: StrategyConfig) -> None:
    for axis in ("pipeline", "context", "tensor", "expert"):
        if axis not in AVAILABLE_AXES and getattr(strategy, axis) > 1:
            raise ConfigError(
                f"{axis} parallelism is not built yet in this version",
                where=f"strategy.{axis}",
                found=getattr(strategy, axis),
                allowed="1; available are data parallelism, ZeRO-1, 2 and 3 over the data ranks, and a pipeline",
                hint="strategy=zero3 or strategy=pipeline where one device cannot hold the model",
            )
