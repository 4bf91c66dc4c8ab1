"""The lines that a run logs before it trains: its model, its layout and its batch, and a look at its data."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from hfdist.checkpoint.folder import step_of
from hfdist.config.batch import BatchPlan
from hfdist.config.data import EXAMPLES, Packing
from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.config.model import AdapterConfig, Init
from hfdist.config.rates import explain_learning_rate
from hfdist.config.run import RunConfig
from hfdist.models.flops import ModelSize
from hfdist.optim.check import describe
from hfdist.optim.registry import make_small
from hfdist.optim.width import rate_factor
from hfdist.planning.describe import describe_shortly
from hfdist.run.data_advice import advise
from hfdist.run.preview import preview
from hfdist.run.state import RunState
from hfdist.run.survey import survey
from hfdist.strategies.engine import Engine
from hfdist.trainer.checkpointing.start import Start
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def tell_start(run: RunState) -> None:
    """Log what a run is about to do; a run that begins anew also shows its data, on rank 0."""
    config, data, steps_done = run.config, run.data, _steps_done(run.start)
    logger.info("%s", _describe(run, steps_done))
    if steps_done or not run.trainer.is_world_process_zero():
        return
    if config.model.init is Init.pretrained and config.data.sources.keys() <= {*EXAMPLES}:
        logger.info("the data are an example of hfdist's; your own: data=FILE or data=FOLDER")
    if data.corpus.has_examples:
        tokens_per_step = run.strategy.batch.tokens_per_step
        found = survey(data.corpus, data.tokenizer, config.data, config.task, tokens_per_step, data.images)
        logger.info("of the data: %s", found)
        advice = advise(data.corpus, data.tokenizer, config)
        if advice is not None:
            logger.warning("%s", advice)
    for text in preview(data.stream, data.tokenizer, config.report.preview, config.task):
        logger.info("%s", text)


def _steps_done(start: Start) -> int:
    """Give the number of steps that the checkpoint has done from which the run goes on; 0: it begins anew."""
    # A checkpoint under another name than ours has no step, which is -1.
    return 0 if start.checkpoint is None else max(step_of(Path(start.checkpoint).name), 0)


def _describe(run: RunState, steps_done: int) -> str:
    """Give a line for each thing that there is to say, with its label before it."""
    config, engine = run.config, run.trainer.engine
    assert engine is not None
    sharding, precision = config.strategy.sharding.value, config.train.precision.value
    rows = {
        "model": _describe_model(run, engine),
        "trained": _describe_trained(config.adapter, engine.size),
        "layout": f"{run.strategy.topology.describe()}; sharding {sharding}; {precision}",
        "islands": _describe_islands(config.islands),
        "plan": "" if run.plan is None else describe_shortly(run.plan),
        "batch": _describe_batch(config, run.strategy.batch),
        "data": run.data.describe(config.task.name.traits.unit),
        "train": _describe_training(run, steps_done),
        "folder": config.run.dir,
    }
    return "\n".join(f"  {label:<9} {text}" for label, text in rows.items() if text)


def _describe_model(run: RunState, engine: Engine) -> str:
    kind, init = cast(PreTrainedModel, engine.model).config.model_type, run.config.model.init.value
    text = f"{kind}, {engine.size.num_parameters:,} parameters, {init} weights, {engine.description}"
    if run.why_together is not None:
        text += f"; packed documents not one by one, since {run.why_together}"
    return text


def _describe_trained(adapter: AdapterConfig, size: ModelSize) -> str:
    text = f"{size.num_trained:,} parameters, {100 * size.num_trained / size.num_parameters:.3g} % of all"
    if adapter.is_used:
        text += f": {adapter.type or f'the adapter of {adapter.path}'}"
    return text


def _describe_batch(config: RunConfig, batch: BatchPlan) -> str:
    task = config.task
    rows = "prompts" if task.name.traits.is_reinforcement else "sequences"
    text = (
        f"{batch.global_batch_size:,} {rows} = "
        f"data ranks {batch.data_size} x micro batches {batch.num_microbatches} x sequences {batch.micro_batch_size}"
    )
    if not task.name.traits.is_reinforcement:
        return f"{text}; {_up_to(config)}{batch.tokens_per_step:,} tokens a step"
    # Nobody knows before how long the answers will be.
    text += f"; {task.num_generations:,} answers to each, of at most {task.max_new_tokens:,} tokens"
    if task.trained_prompts is not None:
        text += f"; {task.trained_prompts:,} of the prompts train"
    return text


def _describe_training(run: RunState, steps_done: int) -> str:
    config, batch, max_steps = run.config, run.strategy.batch, run.trainer.args.max_steps
    done = f", of which {steps_done:,} are done" if steps_done else ""
    in_all = f"{_up_to(config)}{max_steps * batch.tokens_per_step:,} tokens"
    if config.task.name.traits.is_reinforcement:
        in_all = f"{max_steps * batch.global_batch_size:,} prompts"
    optimizer, schedule = describe(make_small(config.optimizer)), config.optimizer.schedule.value
    rate = f"lr {config.optimizer.lr:g}{explain_learning_rate(config)} {schedule}{_describe_width(run)}"
    return f"{max_steps:,} steps{done}, {in_all}; {optimizer}, {rate}"


def _up_to(config: RunConfig) -> str:
    """Say that a number of tokens is a limit, where examples that stay whole leave some of a sequence empty."""
    return "" if config.data.packing is Packing.concat else "up to "


def _describe_width(run: RunState) -> str:
    base_width = run.config.optimizer.base_width
    if base_width is None:
        return ""
    model = cast(PreTrainedModel, run.trainer.model)
    return f", of width {base_width:,}: times {rate_factor(model.config, base_width):.3g} for hidden matrices"


def _describe_islands(islands: IslandsConfig) -> str:
    if not islands.is_used:
        return ""
    where = f"{islands.index} of {islands.count}"
    if islands.method is IslandMethod.parameter_server:
        if islands.staleness is None:
            waits = "asynchronous"
        elif islands.staleness == 0:
            waits = "synchronous"
        else:
            waits = f"staleness {islands.staleness}"
        return f"{where}; parameter server, {waits}; {islands.codec.value}"
    outer = f"outer lr {islands.outer_lr:g}, momentum {islands.outer_momentum:g}"
    return f"{where}; rounds of {islands.every:,} steps; {outer}; {islands.codec.value}"


def describe_kernels(trainer: Trainer) -> str:
    """Say in one line what computes attention and the loss, and how ranks share parameters."""
    assert trainer.engine is not None
    head = trainer.options.loss_head
    return f"{trainer.engine.description}; loss {'of all logits' if head is None else head.description}"
