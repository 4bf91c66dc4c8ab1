"""The optimizer of a training, the user's own or one by name: over this rank's parameters, and fit for the layout."""

from __future__ import annotations

from collections import defaultdict
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
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if foreign:
            what = "the optimizer holds tensors that are no parameters of the model, so no checkpoint could name them"
            found = f"{describe(optimizer)} with {len(foreign)} of them, the first of shape {list(foreign[0].shape)}"
            hint = "make it from model.parameters(), of the very model that the Trainer is given"
            raise ConfigError(what, where="optimizers", found=found, hint=hint)
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        """Names of each parameter of each group: a tied parameter has several."""
        self._states = [(names[id(key)], state) for key, state in optimizer.state.items() if id(key) in names]
        """Names and state of each parameter that has a state."""
        self._others = {key: value for key, value in optimizer.state.items() if id(key) not in names}
        """Entries of the optimizer's state whose keys are no parameters."""

    def move_to(self, model: nn.Module) -> torch.optim.Optimizer:
        """Give the optimizer the parameters of this model, which may be a part of the whole one."""
        parameters = dict(model.named_parameters(remove_duplicate=False))

        def find(tied_names: list[str]) -> nn.Parameter | None:
            # A part of the model may have a tied parameter under one of its names alone, or not at all.
            return next((parameters[name] for name in tied_names if name in parameters), None)

        for group, names_of_group in zip(self.optimizer.param_groups, self._names, strict=True):
            found = [find(tied_names) for tied_names in names_of_group]
            group["params"] = [parameter for parameter in found if parameter is not None]
        self.optimizer.state.clear()
        self.optimizer.state.update(self._others)
        for tied_names, state in self._states:
            parameter = find(tied_names)
            if parameter is not None:
                self.optimizer.state[parameter] = state
        return self.optimizer


class Optimizers:
    """The optimizer of a Trainer with an engine. Make it before the Trainer has one that is not the user's.

    Args:
        training: the handle on the Trainer.
        base_width: width of the model for which the learning rate was found, and from which it is scaled; None: the
            rate is used as it is.
    """

    def __init__(self, training: Training, base_width: int | None) -> None:
        self._training, self._base_width = training, base_width
        trainer = training.trainer
        self._own = None if trainer.optimizer is None else OwnOptimizer(trainer.optimizer, training.model)
        self._own_schedule = trainer.lr_scheduler
        self._earlier_state: dict[tuple[str, str], Any] = {}
        """State from before the training, by names of parameter and entry, for layouts that step other tensors."""

    @contextmanager
    def made_for(self, engine: Engine) -> Iterator[None]:
        """Check, within the block, what the Trainer makes as its optimizer, and make it ready for the layout."""
        trainer = self._training.trainer
        make = trainer.create_optimizer
        ready = trainer.optimizer if isinstance(trainer.optimizer, AcceleratedOptimizer) else None

        def create_optimizer(*more: object, **named: object) -> object:
            nonlocal ready
            # With DeepSpeed, transformers forgets the user's optimizer and schedule, and would make its defaults.
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
        """Check a new optimizer, and give the one that the engine can step in its place."""
        check(optimizer, engine.optimizer_sees, is_saved=self._training.args.save_strategy != "no")
        base_width = self._base_width
        if base_width is not None:
            model = cast(PreTrainedModel, engine.model)
            matrices = hidden_matrices(model, engine.whole_shape)
            scale_rates(optimizer, matrices, rate_factor(model.config, base_width))
        if self._own_schedule is None:
            _drop_empty_groups(optimizer)
        if not engine.steps_other_tensors:
            return optimizer
        if engine.clips_stepped:
            check_steps_all(optimizer, self._training.model)
        self._keep_earlier_state(optimizer)
        # DeepSpeed would replace torch's Adagrad by one without groups.
        return Joined([optimizer]) if isinstance(optimizer, torch.optim.Adagrad) else optimizer

    def _keep_earlier_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the state of parameters out of the optimizer, as whole tensors: it will step other tensors."""
        for name, parameter in self._training.model.named_parameters():
            for key, value in optimizer.state.pop(parameter, {}).items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                self._earlier_state[name, key] = whole

    def begin(self, engine: Engine) -> None:
        """Give the optimizer back its state from before the training, and tell it that a training begins."""
        if self._earlier_state:
            self._put_earlier_state(engine)
        # accelerate's optimizer, or DeepSpeed's.
        cast(AcceleratedOptimizer, self._training.optimizer).train()

    def _put_earlier_state(self, engine: Engine) -> None:
        for piece in engine.pieces():
            # Numbers, such as a count of steps, have keys that begin with "#".
            value = self._earlier_state.get((piece.name, piece.key.removeprefix("#")))
            if torch.is_tensor(value) and value.numel() == piece.total:
                piece.view.copy_(piece.of_whole(value))
            elif value is not None and piece.set_number is not None:
                piece.set_number(value)
        self._earlier_state = {}

    @contextmanager
    def evaluating(self, engine: Engine) -> Iterator[None]:
        """Let the model have, within the block, the weights to be used: a schedule-free optimizer trains at others."""
        # The Trainer's own attribute, as there is no optimizer before the first training.
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


def _drop_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Drop groups without parameters, but for one: DeepSpeed would drop them once the schedule has counted them."""
    groups = optimizer.param_groups
    with_parameters = [group for group in groups if group["params"]]
    groups[:] = with_parameters or groups[:1]
