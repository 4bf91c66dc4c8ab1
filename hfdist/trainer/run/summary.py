"""The start-up summary: layout, parameters per rank, batch arithmetic and tokens, for people."""

from __future__ import annotations

from typing import cast

from transformers import PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.models.flops import ModelSize, num_bytes, num_parameters, num_trained
from hfdist.optim.probe import describe
from hfdist.optim.registry import make_small, values_per_weight
from hfdist.trainer.trainer import Trainer

_BYTES_PER_VALUE = 4


def describe_run(config: RunConfig, trainer: Trainer, *, data: str) -> str:
    """Give the lines that a run starts with.

    Args:
        config: of the run.
        trainer: with a strategy.
        data: one line on the corpus.
    """
    strategy, engine = trainer.strategy, trainer.engine
    assert strategy is not None
    assert engine is not None
    batch, shares = strategy.batch, strategy.shares
    model = cast(PreTrainedModel, engine.model)
    size = num_parameters(model)
    trained = num_trained(model)
    weights, gradients = size * shares.weights, trained * shares.gradients
    optimizer = make_small(config.optimizer)
    moments = trained * shares.optimizer * values_per_weight(optimizer)
    state_bytes = num_bytes(model) * shares.weights + (gradients + moments) * _BYTES_PER_VALUE
    num_sequences = f"{batch.global_batch_size:,} sequences"
    cut = f"data ranks {batch.data_size} x micro batches {batch.num_microbatches} x sequences {batch.micro_batch_size}"
    total = trainer.args.max_steps * batch.tokens_per_step
    rows = [
        (
            "model",
            f"{model.config.model_type}, {engine.size.num_parameters:,} parameters, {config.model.init.value} weights, "
            f"attention {model.config._attn_implementation}",
        ),
        ("trained", _describe_trained(config, engine.size)),
        (
            "layout",
            f"{strategy.topology.describe()}; sharding {config.strategy.sharding.value}; "
            f"{config.train.precision.value}",
        ),
        (
            "per rank",
            f"{weights:,.0f} weights, {gradients:,.0f} gradients, {moments:,.0f} optimizer values: "
            f"about {state_bytes / 2**20:,.0f} MiB",
        ),
        ("batch", f"{num_sequences} = {cut}; {batch.tokens_per_step:,} tokens a step"),
        ("data", data),
        (
            "train",
            f"{trainer.args.max_steps:,} steps, {total:,} tokens; {describe(optimizer)}, "
            f"lr {config.optimizer.lr:g} {config.optimizer.schedule.value}",
        ),
        ("folder", config.run.dir),
    ]
    return "\n".join(f"  {label:<9} {text}" for label, text in rows)


def _describe_trained(config: RunConfig, size: ModelSize) -> str:
    share = f"{size.num_trained:,} parameters, {100 * size.num_trained / size.num_parameters:.3g} % of all"
    adapter = config.adapter
    if not adapter.is_used:
        return share
    return f"{share}: {adapter.type or 'the adapter of ' + str(adapter.path)}"
