"""The optimizer of a training, the user's own or one by name: over this rank's parameters, and fit for the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.optim.check import check, check_steps_all, describe
from hfdist.optim.joined import Joined
from hfdist.optim.width import hidden_matrices, rate_factor, scale_rates
from hfdist.strategies.engine import Engine
from hfdist.trainer.training import Training


class OwnOptimizer:
    """A user's own optimizer, with its parameters by name: a layout may put other tensors in their place."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if foreign:
            what = "the optimizer holds tensors that are no parameters of the model, so no checkpoint could name them"
            found = f"{describe(optimizer)} with {len(foreign)} of them, the first of shape {list(foreign[0].shape)}"
            hint = "make it from model.parameters(), of the very model that the Trainer is given"
            raise ConfigError(what, where="optimizers", found=found, hint=hint)
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        self._states = [(names[id(key)], state) for key, state in optimizer.state.items() if id(key) in names]
        self._others = {key: value for key, value in optimizer.state.items() if id(key) not in names}
        """What it keeps under keys that are no parameters."""

    def move_to(self, model: nn.Module) -> torch.optim.Optimizer:
        """Give the optimizer the parameters of this model, which may be a part of the whole one."""
        parameters = dict(model.named_parameters(remove_duplicate=False))

        def find(tied: list[str]) -> list[nn.Parameter]:
            return [parameters[name] for name in tied if name in parameters][:1]

        for group, names in zip(self.optimizer.param_groups, self._names, strict=True):
            group["params"] = [parameter for tied in names for parameter in find(tied)]
        self.optimizer.state.clear()
        moved = {parameter: state for tied, state in self._states for parameter in find(tied)}
        self.optimizer.state.update(self._others | moved)
        return self.optimizer


class Optimizers:
    """The optimizer of a Trainer with an engine. Make it before the Trainer has one that is not the user's.

    `base_width`: see `RunOptions`.
    """

    def __init__(self, training: Training, base_width: int | None) -> None:
        self._training, self._base_width = training, base_width
        trainer = training.trainer
        self._own = None if trainer.optimizer is None else OwnOptimizer(trainer.optimizer, training.model)
        self._own_schedule = trainer.lr_scheduler
        self._earlier_state: dict[tuple[str, str], Any] = {}
        """State from before the training, by parameter and key, for layouts that step other tensors."""

    @contextmanager
    def made_for(self, engine: Engine) -> Iterator[None]:
        """Check, within the block, what the Trainer makes as its optimizer, and make it ready for the layout."""
        trainer = self._training.trainer
        make = trainer.create_optimizer
        ready = trainer.optimizer if isinstance(trainer.optimizer, AcceleratedOptimizer) else None

        def create_optimizer(*more: object, **named: object) -> object:
            nonlocal ready
            # With DeepSpeed, transformers forgets both, and would take its defaults.
            if trainer.optimizer is None and self._own is not None:
                trainer.optimizer = self._own.move_to(self._training.model)
            if trainer.lr_scheduler is None:
                trainer.lr_scheduler = self._own_schedule
            if ready is None or trainer.optimizer is not ready:
                # An override may set the attribute alone, and return nothing.
                made = make(*more, **named)
                ready = trainer.optimizer = self._make_ready(trainer.optimizer if made is None else made, engine)
            return ready

        # An attribute of the object, so that what an override of the class makes is made ready, too.
        trainer.create_optimizer = create_optimizer  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del trainer.create_optimizer

    def _make_ready(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        check(optimizer, engine.optimizer_sees, is_saved=self._training.args.save_strategy != "no")
        base_width = self._base_width
        if base_width is not None:
            model = cast(PreTrainedModel, engine.model)
            matrices = hidden_matrices(model, engine.whole_shape)
            scale_rates(optimizer, matrices, rate_factor(model.config, base_width))
        if self._own_schedule is None:
            # Such as that of an adapter's vectors: DeepSpeed drops them later, when the schedule counts them.
            groups = optimizer.param_groups
            groups[:] = [group for group in groups if group["params"]] or groups[:1]
        if not engine.steps_other_tensors:
            return optimizer
        names = {id(parameter): name for name, parameter in self._training.model.named_parameters()}
        if engine.clips_stepped:
            check_steps_all(optimizer, self._training.model)
        states = {key: state for key, state in optimizer.state.items() if id(key) in names}
        for parameter, state in states.items():
            whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
            self._earlier_state |= {(names[id(parameter)], key): value for key, value in whole.items()}
            del optimizer.state[parameter]
        # DeepSpeed would replace torch's Adagrad by one without groups.
        return Joined([optimizer]) if isinstance(optimizer, torch.optim.Adagrad) else optimizer

    def begin(self, engine: Engine) -> None:
        """Give the optimizer back what it has kept from before, and tell it that a training begins."""
        for piece in engine.pieces() if self._earlier_state else ():
            value = self._earlier_state.get((piece.name, piece.key.removeprefix("#")))
            if torch.is_tensor(value) and value.numel() == piece.total:
                piece.view.copy_(piece.of_whole(value))
            elif value is not None and piece.set_number is not None:
                piece.set_number(value)
        self._earlier_state = {}
        # accelerate's, or DeepSpeed's.
        cast(AcceleratedOptimizer, self._training.optimizer).train()

    @contextmanager
    def evaluating(self, engine: Engine) -> Iterator[None]:
        """Put in, within the block, the weights to be used, where an optimizer trains at others (schedule-free)."""
        # There is none before the first training.
        optimizer: object = self._training.trainer.optimizer
        inner = optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        if not isinstance(optimizer, AcceleratedOptimizer) or not callable(getattr(inner, "eval", None)):
            yield
            return
        optimizer.eval()
        engine.after_load()
        try:
            yield
        finally:
            optimizer.train()
            engine.after_load()
