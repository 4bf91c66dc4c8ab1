"""What `evaluate.*` adds to a Trainer: samples, metrics and early stopping; and the names in it, checked beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfdist.config.run import RunConfig
from hfdist.data.documents.prompts import take_examples
from hfdist.errors import DataError
from hfdist.topology import Topology
from hfdist.trainer.evaluation import lm_eval
from hfdist.trainer.evaluation.early_stopping import EarlyStopping
from hfdist.trainer.evaluation.metrics import load_metrics
from hfdist.trainer.evaluation.samples import GenerationMetrics, PromptSamples

# A trainer is Any here: transformers declares all its parts as optional, and they exist by now.


def check_named(config: RunConfig, topology: Topology) -> None:
    """Check that the metrics and tasks that are named exist.

    Raises:
        ConfigError: one does not, or its package is not installed.
    """
    load_metrics(config.evaluate.metrics)
    if config.evaluate.lm_eval:
        lm_eval.check(config.evaluate, knows_tasks=topology.is_main)


def add_evaluators(trainer: Any, held_out: Any, config: RunConfig) -> None:
    """Add what evaluations do besides the loss, and what they may end.

    Args:
        trainer: with a strategy and a tokenizer.
        held_out: the held-out set; None: nothing is evaluated.
        config: of the run.

    Raises:
        ConfigError: the prompts do not go with the tokenizer or the model.
        DataError: the held-out set has nothing to continue.
    """
    evaluate = config.evaluate
    if held_out is None:
        return
    if evaluate.prompts:
        samples = PromptSamples(Path(config.run.dir), trainer, evaluate, config.data.chat)
        trainer.measures.append(samples)
        trainer.add_callback(samples)
    if evaluate.metrics:
        examples = take_examples(held_out, evaluate.num_generations)
        if not examples:
            raise DataError("no held-out document is long enough to continue it", where="evaluate.metrics")
        metrics = load_metrics(evaluate.metrics)
        trainer.measures.append(GenerationMetrics(trainer, examples, metrics, evaluate.max_new_tokens))
    if evaluate.patience is not None:
        trainer.add_callback(EarlyStopping(evaluate.patience, evaluate.min_delta))
