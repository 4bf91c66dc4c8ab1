"""transformers' events without the calls of what a callback inherits, which does nothing: 50 to 160 a step of a run."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler


class LeanCallbackHandler(CallbackHandler):
    """Calls the callbacks that have a method of their own for an event."""

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Give the control as the callbacks leave it."""
        # None where a Trainer of the user's own has made up the event.
        inherited = getattr(TrainerCallback, event, None)
        for callback in self.callbacks:
            method = getattr(callback, event)
            if inherited is not None and getattr(method, "__func__", None) is inherited:
                continue
            changed = method(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            control = control if changed is None else changed
        return control


def use_lean_handler(handler: CallbackHandler) -> None:
    """Make a Trainer's handler a lean one, unless a class of its own has done something to it."""
    if type(handler) is CallbackHandler:
        handler.__class__ = LeanCallbackHandler
