"""Which blocks each stage runs, as `strategy.balance` asks."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from hfdist.config.batch import BatchPlan
from hfdist.config.pipeline import Balance
from hfdist.config.strategy import StrategyConfig
from hfdist.pipeline.costs import costs_by_flops, costs_by_parameters
from hfdist.pipeline.partition import Costs, explicit, partition
from hfdist.pipeline.view import Block


def choose_stages(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    strategy: StrategyConfig,
    batch: BatchPlan,
    rank_of_stage: tuple[int, ...],
) -> tuple[range, ...]:
    """Give the blocks of each stage; every rank comes to the same answer.

    Raises:
        PartitionError: fewer blocks than stages.
        ConfigError: `strategy.blocks_per_stage` does not fit the model.
    """
    if strategy.blocks_per_stage is not None:
        return explicit(strategy.blocks_per_stage, len(blocks), len(rank_of_stage))
    return partition(_costs(model, blocks, strategy.balance, batch), rank_of_stage)


def _costs(model: PreTrainedModel, blocks: Sequence[Block], balance: Balance, batch: BatchPlan) -> Costs:
    match balance:
        case Balance.parameters:
            return costs_by_parameters(model, blocks)
        case Balance.flops:
            return costs_by_flops(model, blocks, batch.sequence_length)
