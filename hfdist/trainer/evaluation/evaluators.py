"""Makes what the keys `evaluate.*` add to a Trainer: samples, metrics and early stopping."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hfdist.config.run import EvaluateConfig, RunConfig
from hfdist.config.task import Head
from hfdist.data.documents.examples import take_examples
from hfdist.data.tokenization.pair_encoder import PairEncoder
from hfdist.errors import DataError
from hfdist.topology import Topology
from hfdist.trainer.checkpointing.log_history import newest_losses
from hfdist.trainer.evaluation import lm_eval
from hfdist.trainer.evaluation.generation import (
    Generate,
    GenerationMetrics,
    PromptSamples,
    encode_prompts,
    load_metrics,
)
from hfdist.trainer.evaluation.loop import Measure
from hfdist.trainer.generation.continuation import can_use_cache
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.limits import GenerationLimits, find_limits
from hfdist.trainer.generation.targets import write_targets

logger = logging.getLogger(__name__)


def check_named(config: RunConfig, topology: Topology) -> None:
    """Check that the metrics and lm-eval tasks of the config exist; ConfigError: one does not, or is not installed."""
    load_metrics(config.evaluate.metrics)
    if config.evaluate.lm_eval:
        lm_eval.check(config.evaluate, lists_tasks=topology.is_main)


def make_evaluators(
    config: RunConfig,
    held_out: object,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    topology: Topology,
) -> tuple[list[Measure], list[TrainerCallback]]:
    """Give what evaluations of the held-out set measure besides the loss, and the callbacks that belong to it.

    Raises:
        ConfigError: a prompt or a metric that cannot be used.
        DataError: no held-out document can be continued.
    """
    evaluate = config.evaluate
    measures: list[Measure] = []
    callbacks: list[TrainerCallback] = []
    if held_out is None:
        return measures, callbacks
    if evaluate.prompts or evaluate.metrics:
        limits = find_limits(model, tokenizer, evaluate.max_new_tokens)
        generate = _make_generate(config, model, limits, topology, arguments.per_device_eval_batch_size)
    if evaluate.prompts:
        if config.task.name.traits.head is Head.targets:
            ids = [PairEncoder(tokenizer, config.data.pairs).source(prompt) for prompt in evaluate.prompts]
        else:
            ids = encode_prompts(tokenizer, evaluate.prompts, evaluate.chat, config.data.chat)
        samples = PromptSamples(config.run.folder.samples, tokenizer, generate, evaluate.prompts, ids)
        measures.append(samples)
        callbacks.append(samples)
    if evaluate.metrics:
        examples = take_examples(held_out, evaluate.num_generations)
        if not examples:
            raise DataError("no held-out document is long enough to continue it", where="evaluate.metrics")
        metrics = load_metrics(evaluate.metrics)
        measures.append(GenerationMetrics(tokenizer, generate, examples, metrics, evaluate.max_new_tokens))
    if evaluate.patience is not None:
        callbacks.append(EarlyStopping(evaluate))
    return measures, callbacks


def _make_generate(
    config: RunConfig, model: PreTrainedModel, limits: GenerationLimits, topology: Topology, rows_at_once: int
) -> Generate:
    """Give the function that continues prompts, or writes the targets of sources with an encoder-decoder."""
    if config.task.name.traits.head is Head.targets:
        return partial(write_targets, limits=limits, model=model, topology=topology, rows_at_once=rows_at_once)
    uses_cache = can_use_cache(model, topology)
    return partial(continue_prompts, limits=limits, topology=topology, rows_at_once=rows_at_once, uses_cache=uses_cache)


def num_without_improvement(losses: Sequence[float], min_delta: float) -> int:
    """Count the evaluations since the last new best: a loss that is lower than the best before by `min_delta` or more.

    A loss that is not finite is no new best. A smaller improvement is none either, so many small ones add up to one.
    """
    best, since = float("inf"), 0
    for loss in losses:
        if loss < best and best - loss >= min_delta:
            best, since = loss, 0
        else:
            since += 1
    return since


def is_out_of_patience(state: TrainerState, evaluate: EvaluateConfig) -> bool:
    """Whether so many evaluations in a row brought no new best as `evaluate.patience` allows."""
    if evaluate.patience is None:
        return False
    losses = newest_losses(state.log_history)
    return num_without_improvement(losses, evaluate.min_delta) >= evaluate.patience


class EarlyStopping(TrainerCallback):
    """Ends the training on all ranks after the same evaluation: all have the same losses.

    transformers' own callback keeps a counter: checkpoints would have to hold it, and a rollback would have to reset
    it. This one counts in `state.log_history`, which both keep right, and which is never cut to `patience`
    evaluations or fewer.
    """

    def __init__(self, evaluate: EvaluateConfig) -> None:
        self._evaluate = evaluate

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """End at once a run that goes on from where it had stopped."""
        control.should_training_stop |= is_out_of_patience(state, self._evaluate)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop, with a checkpoint, once the patience is used up."""
        if not is_out_of_patience(state, self._evaluate) or state.global_step >= state.max_steps:
            return
        control.should_training_stop = True
        control.should_save = args.save_strategy != "no"
        logger.info(
            "stopping at step %d: %d evaluations in a row without a lower held-out loss (min_delta %g)",
            *(state.global_step, self._evaluate.patience, self._evaluate.min_delta),
        )
