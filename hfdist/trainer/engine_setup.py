"""Checks what a Trainer is constructed with, and builds the engine of its model."""

from __future__ import annotations

import dataclasses

import transformers
from torch import nn

from hfdist.errors import ConfigError
from hfdist.models.adapter import check_adapted
from hfdist.models.names.hub_names import find_hub_names
from hfdist.models.routers import leave_out_router_loss
from hfdist.models.stacked_experts import use_products
from hfdist.open_files import raise_limit
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Engine
from hfdist.strategies.from_python import strategy_by_name
from hfdist.trainer.checkpointing.adapter_files import check_adapter_names, has_adapter
from hfdist.trainer.constructor_arguments import (
    check_arguments,
    check_class_loss,
    check_count,
    check_half_weights,
    check_is_arguments,
)
from hfdist.trainer.hooks import check_hooks, owner_of
from hfdist.trainer.optimizers import OwnOptimizer
from hfdist.trainer.row_check import check_is_dataset, check_rows
from hfdist.trainer.trl_trainers import Arguments, check_trl_arguments, sums_over_targets, with_adapter
from hfdist.trainer.whole_model import find_model

_READERS = ("__init__", "get_train_dataloader", "training_step", "compute_loss")
"""Methods of a Trainer's class that may read other rows than the original would."""


def find_strategy(strategy: object, arguments: Arguments) -> tuple[Strategy, Arguments]:
    """Give the strategy, or make it by its name, with the arguments that fit it; ConfigError: there is none."""
    where = "Trainer(strategy)"
    if not isinstance(strategy, Strategy | str):
        allowed, hint = 'hfdist.make_strategy(...), the name of a preset such as "fsdp2", None', 'strategy="fsdp2"'
        if isinstance(strategy, dict) and strategy:
            hint = _call_with(strategy)
        raise ConfigError("this is no strategy", where=where, found=repr(strategy), allowed=allowed, hint=hint)
    args = arguments.get("args")
    check_is_arguments(args)
    if isinstance(strategy, Strategy):
        return strategy, arguments
    if args is None:
        what, hint = "a strategy by its name takes the sizes of the training arguments", "args=TrainingArguments(...)"
        raise ConfigError(what, where="args", found="None", hint=hint)
    made = strategy_by_name(strategy, args)
    return made, arguments | {"args": dataclasses.replace(args, **made.training_arguments())}


def _call_with(values: dict[str, object]) -> str:
    """Write the call of `make_strategy` that means what somebody gave as a dict."""
    keywords = {"global_batch_size": 8} | values
    name = keywords.pop("name", None)
    given = [] if name is None else [repr(name)]
    given += [f"{key}={value!r}" for key, value in keywords.items()]
    return f"hfdist.make_strategy({', '.join(given)})"


def build_engine(kind: type, strategy: Strategy, arguments: Arguments) -> tuple[Engine, Arguments]:
    """Check what a Trainer is made with, and build the engine of its model. A collective.

    Args:
        kind: the class of the trainer.
        strategy: the layout.
        arguments: all arguments of the class after the mixin, by name.

    Returns:
        The engine, and the arguments with the engine's model.

    Raises:
        ConfigError: an argument or the class does not go with the layout.
    """
    args = check_arguments(arguments.get("args"), strategy)
    check_hooks(kind, strategy.topology)
    check_class_loss(kind, arguments, strategy.topology)
    # A recipe has done both already; from Python nobody else would.
    raise_limit()
    strategy.start()
    model = find_model(kind, arguments, strategy)
    if arguments.get("model") is None:
        # `find_model` has called it, and the original would call it once more.
        arguments = arguments | {"model_init": None}
    arguments = arguments | {"model": model}
    if all(owner_of(kind, name) is transformers.Trainer for name in _READERS):
        collates_itself = arguments.get("data_collator") is not None
        check_is_dataset(arguments.get("eval_dataset"), "eval_dataset")
        check_rows(arguments.get("train_dataset"), arguments["model"], collates_itself=collates_itself)
    check_trl_arguments(kind, arguments, strategy)
    arguments = with_adapter(arguments, kind, strategy)
    check_half_weights(arguments["model"], args)
    if getattr(arguments["model"], "peft_config", None):
        # The same for recipes, `peft_config`, and a model that brings its adapter.
        check_adapted(arguments["model"], strategy, where="peft_config")
        check_adapter_names(arguments["model"])
        # Imported here alone: it imports PEFT, which takes a second.
        from hfdist.models.expert_factors import use_factors

        use_factors(arguments["model"])
    optimizer, _ = arguments.get("optimizers") or (None, None)
    # Before the model is distributed: the names of its parameters are found by the tensors of the whole model.
    own = None if optimizer is None else OwnOptimizer(optimizer, arguments["model"])
    engine = distribute(kind, strategy, arguments["model"])
    if not engine.reduces_gradients:
        check_count(args, strategy.topology)
    if own is not None:
        own.move_to(engine.model)
    return engine, arguments | {"model": engine.model}


def distribute(kind: type, strategy: Strategy, model: nn.Module) -> Engine:
    """Build the engine of a whole model that `kind` trains."""
    if sums_over_targets(kind):
        leave_out_router_loss(model)
    if not has_adapter(model):
        # Found and kept while the model is whole: a part of it would lack names.
        find_hub_names(model)
    use_products(model)
    return strategy.build(model)


def check_has_logits(engine: Engine, asker: str) -> None:
    """Raise a ConfigError where the original cannot gather logits: no rank has them whole, or several have the same.

    `asker` names what needs them.
    """
    hint = "evaluate() gives the loss; or save_model(folder), and predict with the folder's model"
    if not engine.runs_whole_model:
        what = f"{asker} needs the logits of whole sequences, and each rank has a part of them"
        raise ConfigError(what, where="strategy.pipeline, strategy.context", hint=hint)
    if engine.loss_group is not None:
        what = f"{asker} gathers logits of all ranks, and those of a tensor group have the same"
        raise ConfigError(what, where="strategy.tensor", hint=hint)
