"""What a run asks of its Trainer besides TrainingArguments, and what the optimizer of an island is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hfdist.checkpoint import Keep
from hfdist.config.composition.config_text import to_values
from hfdist.config.islands import IslandMethod
from hfdist.config.run import RunConfig
from hfdist.config.task import Head
from hfdist.config.train import TrainConfig
from hfdist.islands.parameter_client import GradientRecorder
from hfdist.islands.parameter_store import find_slots
from hfdist.models.loss import choose_loss
from hfdist.models.processor import copy_files
from hfdist.optim.registry import ClassAndSettings, find_optimizer
from hfdist.run.state import RunState
from hfdist.trainer.checkpointing.start import open_replicas
from hfdist.trainer.fault_tolerance.skip_counter import Tolerance
from hfdist.trainer.island.parameter_island import ServerOptimizer
from hfdist.trainer.run_options import RunOptions

_UNCLIPPED = 1e30
"""A norm that no finite gradient reaches."""


def train_settings_here(config: RunConfig) -> TrainConfig:
    """Give `train.*` as this process does it.

    Raises:
        ConfigError: a parameter server that cannot step this optimizer.
    """
    if config.islands.method is not IslandMethod.parameter_server:
        return config.train
    find_slots(config.optimizer)
    # The server clips, by the norm of all islands' gradients.
    return replace(config.train, max_grad_norm=_UNCLIPPED)


def optimizer_here(config: RunConfig, *, warmup_steps: int) -> ClassAndSettings:
    """Give the optimizer that steps in this process."""
    if config.islands.method is IslandMethod.parameter_server:
        return GradientRecorder, {"lr": config.optimizer.lr}
    return find_optimizer(config.optimizer, warmup_steps=warmup_steps)


def make_options(run: RunState, processor_files: Sequence[Path] = ()) -> RunOptions:
    """Make them of the config, and of what the parts of the run measure.

    `processor_files` go with each saved model, as those of a model of image and text.
    """
    config, checkpoint, train = run.config, run.config.checkpoint, run.config.train
    has_tokens = config.task.name.traits.head is Head.tokens
    return RunOptions(
        run_values=to_values(config),
        keep=Keep(newest=checkpoint.keep, every=checkpoint.keep_every, best=checkpoint.keep_best),
        uploader=run.uploader,
        replicas=open_replicas(config),
        replicate_every=checkpoint.replicate_every,
        save_in_background=checkpoint.background,
        objective=run.objective,
        write_more=partial(copy_files, processor_files) if run.objective is None else run.objective.write_files,
        loss_head=choose_loss(config, run.model, run.strategy) if has_tokens else None,
        base_width=config.optimizer.base_width,
        limits=Tolerance(
            skipped_steps=train.max_skipped_steps,
            rollbacks=train.max_rollbacks,
            compare_replicas_every=train.compare_replicas_every,
        ),
        measures=run.measures,
        figures=run.usage.figures,
        islands=config.islands if config.islands.is_used else None,
        server_optimizer=ServerOptimizer(config=config.optimizer, max_grad_norm=train.max_grad_norm),
    )
