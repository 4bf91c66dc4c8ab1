"""Which blocks each stage runs, as `strategy.balance` asks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

import torch
from transformers import PreTrainedModel

from hfdist.collectives import gather_json
from hfdist.config.batch import BatchPlan
from hfdist.config.pipeline import Balance
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Precision
from hfdist.pipeline.partitioning.costs import costs_by_flops, costs_by_parameters
from hfdist.pipeline.partitioning.partition import Costs, explicit, partition
from hfdist.pipeline.partitioning.profile import costs_by_time
from hfdist.pipeline.stage_module import Block

logger = logging.getLogger(__name__)


def choose_stages(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    strategy: StrategyConfig,
    batch: BatchPlan,
    rank_of_stage: tuple[int, ...],
    precision: Precision,
) -> tuple[range, ...]:
    """Give the blocks of each stage; every rank comes to the same answer.

    Raises:
        PartitionError: fewer blocks than stages.
        ConfigError: `strategy.blocks_per_stage` does not fit the model.
    """
    if strategy.blocks_per_stage is not None:
        return explicit(strategy.blocks_per_stage, len(blocks), len(rank_of_stage))
    match strategy.balance:
        case Balance.parameters:
            costs = costs_by_parameters(model, blocks)
        case Balance.flops:
            costs = costs_by_flops(model, blocks, batch.sequence_length)
        case Balance.measured:
            costs = _measure(model, blocks, batch, precision)
    return partition(costs, rank_of_stage)


def _measure(model: PreTrainedModel, blocks: Sequence[Block], batch: BatchPlan, precision: Precision) -> Costs:
    """Every rank measures, and all take the mean, so that all cut alike."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    half = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(precision)
    tokens = torch.zeros(batch.micro_batch_size, batch.sequence_length, dtype=torch.int64)
    own = costs_by_time(
        model,
        blocks,
        tokens,
        device,
        lambda: torch.autocast(device.type, dtype=half or torch.bfloat16, enabled=half is not None),
    )
    every = [Costs(**{**costs, "blocks": tuple(costs["blocks"])}) for costs in gather_json(asdict(own))]
    logger.info("measured: blocks %s s, embedding %.3g s, head and loss %.3g s", own.blocks, own.prologue, own.epilogue)
    seconds = [fmean(times) for times in zip(*(costs.blocks for costs in every), strict=True)]
    # Differences below a hundredth of a block are noise, which must not decide between cuts.
    grain = fmean(seconds) / 100
    return Costs(
        blocks=tuple(round(time / grain) * grain for time in seconds),
        prologue=fmean(costs.prologue for costs in every),
        epilogue=fmean(costs.epilogue for costs in every),
    )
