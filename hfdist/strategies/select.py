"""The one place that turns a choice of layout into a strategy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hfdist.config.batch import BatchPlan, plan_batch
from hfdist.config.checks.deepspeed import check_optimizer_sections, read_deepspeed_file
from hfdist.config.checks.values import check_layout
from hfdist.config.cli.process_end import report_uncaught
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import ConfigError
from hfdist.strategies.base import Strategy
from hfdist.topology import Topology


def select_strategy(
    strategy: StrategyConfig, train: TrainConfig, *, topology: Topology, batch: BatchPlan, device_type: str
) -> Strategy:
    """Give the strategy that `strategy.*` asks for.

    Args:
        strategy: the keys.
        train: those of the run.
        topology: degrees and place of this process, or of one that is planned.
        batch: of a step.
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


def make_strategy(
    *,
    global_batch_size: int,
    micro_batch_size: int = 1,
    sequence_length: int = 1024,
    precision: str = "fp32",
    max_grad_norm: float = 1.0,
    **layout: Any,
) -> Strategy:
    """Make a strategy from Python, for `hfdist.Trainer` with a model and a dataset of one's own.

    From then on an error of hfdist's that the program does not catch ends it as a recipe ends: see `report_uncaught`.

        strategy = hfdist.make_strategy(pipeline=2, sharding="zero1", global_batch_size=32, micro_batch_size=4)
        args = TrainingArguments("out", bf16=True, **strategy.training_arguments())
        hfdist.Trainer(model, args, strategy=strategy, train_dataset=dataset).train()

    Args:
        global_batch_size: sequences in one optimizer step, over all processes.
        micro_batch_size: sequences in one forward of one data rank.
        sequence_length: of a usual sequence in tokens, to balance the stages of a pipeline.
        precision: fp32, bf16 or fp16, as in the TrainingArguments.
        max_grad_norm: as in the TrainingArguments; DeepSpeed clips by itself.
        layout: the keys of `strategy.*`, under their names and with their values there; `deepspeed` may be the path of
            a DeepSpeed config file.

    Raises:
        ConfigError: a key, a value or a size that does not fit.
    """
    report_uncaught()
    if isinstance(layout.get("deepspeed"), str):
        layout["deepspeed"] = read_deepspeed_file(layout["deepspeed"], "make_strategy(deepspeed)")
    strategy, train = _typed(layout, {"precision": precision, "max_grad_norm": max_grad_norm})
    if train.precision is Precision.fp8:
        what, allowed = "the model is the caller's own, and only a run changes its layers to float8", "fp32, bf16, fp16"
        raise ConfigError(what, where="make_strategy(precision)", found="fp8", allowed=allowed, hint='precision="bf16"')
    check_layout(strategy, train)
    check_optimizer_sections(strategy.deepspeed, None)
    topology = Topology.from_environment(strategy.degrees)
    batch = plan_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_size=topology.data_size,
        sequence_length=sequence_length,
        lanes=topology.data_size,
    )
    return select_strategy(strategy, train, topology=topology, batch=batch, device_type=device_type_here())


def _typed(layout: dict[str, Any], train: dict[str, Any]) -> tuple[StrategyConfig, TrainConfig]:
    try:
        typed: Any = [
            OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values))
            for kind, values in ((StrategyConfig, layout), (TrainConfig, train))
        ]
    except OmegaConfBaseException as error:
        raise ConfigError(
            str(error).splitlines()[0],
            where=f"make_strategy({error.full_key or ', '.join(layout)})",
            allowed=", ".join(field.name for field in dataclasses.fields(StrategyConfig)),
            hint="the keys and values of conf/strategy/single.yaml",
        ) from error
    return typed[0], typed[1]
