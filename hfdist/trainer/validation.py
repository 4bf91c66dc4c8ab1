"""What a Trainer with a strategy refuses, before anything is trained wrongly."""

from __future__ import annotations

from typing import Any

from hfdist.errors import ConfigError, DataError
from hfdist.models.architecture import check_router_loss
from hfdist.strategies.base import Engine, Strategy
from hfdist.trainer.trl_trainers import owner_of_loss, sums_over_targets

_REFUSED = {
    "save_only_model": (
        "a checkpoint holds all that a run goes on from, in each layout",
        "each checkpoint is a Hub model folder, too; save_model(folder) writes the model alone",
    ),
    "auto_find_batch_size": (
        "the strategy has planned the batch, and another size would be another training",
        "a smaller micro_batch_size for hfdist.make_strategy: the global batch stays",
    ),
}
"""Arguments that a strategy refuses: why, and what to do instead."""


def check_arguments(args: Any, strategy: Strategy) -> None:
    """Compare TrainingArguments with the layout's numbers, which the original class reads there.

    Raises:
        ConfigError: they differ, or ask for what checkpoints by name do not do.
    """
    for name, value in strategy.training_arguments().items():
        if getattr(args, name, None) != value:
            raise ConfigError(
                "the training arguments were not made for this strategy",
                where=f"args.{name}",
                found=getattr(args, name, None),
                hint="TrainingArguments(..., **strategy.training_arguments())",
            )
    for name, value in strategy.agreed_arguments().items():
        if getattr(args, name) != value:
            raise ConfigError(
                "the strategy was made for another value, which DeepSpeed works with",
                where=f"args.{name}",
                found=getattr(args, name),
                allowed=str(value),
                hint="the same precision and max_grad_norm for hfdist.make_strategy and for TrainingArguments "
                "(those of TRL are bf16=True by default)",
            )
    for name, (reason, hint) in _REFUSED.items():
        if getattr(args, name):
            raise ConfigError(reason, where=f"args.{name}", found="True", allowed="False", hint=hint)


def check_loss(kind: type, strategy: Strategy) -> None:
    """Check the class of a Trainer against what a part of a model can do, before anything is built.

    Raises:
        ConfigError: under a pipeline, a loss of its own that is not known to be a sum over targets.
    """
    if strategy.topology.pipeline > 1 and not sums_over_targets(kind):
        raise ConfigError(
            "a pipeline ends the model's forward on all stages but the last, so what this class does after it may "
            "wait for the other ranks for ever",
            where=f"{kind.__name__}.compute_loss",
            found=f"that of {owner_of_loss(kind).__name__}",
            hint="compute_loss_func=..., or a strategy without a pipeline, such as zero3",
        )


def check_trainer(trainer: Any, engine: Engine) -> None:
    """Check what a subclass or the caller brings along against what a part of a model can do.

    Raises:
        ConfigError: metrics from logits, or a loss over routers.
    """
    if engine.runs_whole_model:
        return
    if trainer.compute_metrics is not None:
        check_has_logits(engine, "compute_metrics")
    # Once more: a class may have switched it on since.
    check_router_loss(trainer.model.config)


def check_has_logits(engine: Engine, wish: str) -> None:
    """Refuse what needs logits where no rank has them whole.

    Raises:
        ConfigError: always, under a pipeline.
    """
    if not engine.runs_whole_model:
        raise ConfigError(
            f"{wish} needs logits, which only the last stage of a pipeline has, piece by piece",
            where="strategy.pipeline",
            hint="evaluate() gives the loss; or save_model(folder), and predict with the folder's model",
        )


def check_trials(trainer: Any) -> None:
    """Refuse trials whose checkpoints would go to different folders: each rank writes its part of one.

    Raises:
        ConfigError: several ranks, of which only the first knows which trial it is, and checkpoints.
    """
    if trainer.args.world_size > 1 and trainer.args.save_strategy != "no":
        raise ConfigError(
            "only rank 0 knows the folder of a trial, and each rank writes a part of a checkpoint",
            where="hyperparameter_search with args.save_strategy",
            found=f"{trainer.args.save_strategy.value}, {trainer.args.world_size} processes",
            hint="save_strategy='no', or one process a trial",
        )


def check_has_trained(step: int) -> None:
    """Refuse data that end before the first step.

    Raises:
        DataError: they do.
    """
    if step == 0:
        raise DataError(
            "the data have ended, and there was nothing in them to train on",
            where="data.sources",
            found="only rows that are empty, bad, held out or quarantined",
            hint="python recipes/audit.py run=... counts them",
        )
