"""Whether a model divides as a layout asks, found on its shape alone, before weights are read or a rank is started."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hfdist.config.checks.preflight import plan_run
from hfdist.config.paths import expand_user
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Balance, StrategyConfig
from hfdist.models import find_architecture
from hfdist.models.blocks import find_block_parts
from hfdist.models.build import make_without_values
from hfdist.strategies.context_check import choose_method
from hfdist.strategies.experts import make_expert_plan
from hfdist.strategies.select import device_type_here, select_strategy
from hfdist.strategies.tensor.plan import first_plan


def check_model_fits(config: RunConfig, processes: int) -> None:
    """Compare the layout with a model whose config is on this machine; of one of the Hub, the ranks find it.

    Raises:
        ConfigError, PartitionError: blocks, heads, experts or micro batches that do not divide; or as of
            `find_architecture`.
    """
    model, degrees = config.model, config.strategy
    is_here = model.name is None or (expand_user(model.name) / "config.json").is_file()
    if not degrees.mesh.splits_model or not is_here or model.trust_remote_code:
        return
    topology, batch = plan_run(config, world_size=processes)
    strategy = select_strategy(degrees, config.train, topology=topology, batch=batch, device_type=device_type_here())
    head = config.task.name.traits.head
    architecture = find_architecture(model, sequence_length=config.data.sequence_length, head=head)
    with torch.device("meta"):
        whole = make_without_values(model, architecture, head=head)
    if degrees.pipeline > 1:
        # Imported where it is chosen, as in `select_strategy`.
        from hfdist.pipeline.partition import choose_stages
        from hfdist.strategies.pipelines.pipeline import PipelineStrategy

        assert isinstance(strategy, PipelineStrategy)
        # How stages are balanced costs time, and does not matter for their number.
        split, blocks = replace(degrees, balance=Balance.parameters), find_block_parts(whole)
        choose_stages(whole, blocks, split, batch, strategy.rank_of_stage, config.train.precision)
    check_degrees(whole, degrees)


def check_degrees(whole: PreTrainedModel, degrees: StrategyConfig) -> None:
    """Raise a ConfigError where layers, experts or tokens of a model do not divide; its weights need no values."""
    if degrees.tensor > 1:
        first_plan(whole, degrees.tensor, splits_tokens=degrees.sequence)
    if degrees.expert > 1:
        make_expert_plan(whole, degrees.expert)
    if degrees.context > 1:
        choose_method(whole, degrees.context * degrees.tensor, degrees.context_method)
