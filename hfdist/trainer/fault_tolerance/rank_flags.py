"""Once a step the ranks tell each other whether one of them wants something of all: a signal, a failed save.

This is one reduction of a few numbers that runs beside the step, in the control group, on the CPU: nobody waits for it,
and the GPU is not synchronised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.control_group import ControlGroup, control_group


@runtime_checkable
class RankFlag(Protocol):
    """Something that one rank notices and that concerns all ranks."""

    def flag(self) -> int:
        """Say what this rank wants; 0: nothing. The largest flag of all ranks counts."""

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Act upon a flag that is not 0, at the end of the same step on all ranks."""


class RankFlags(TrainerCallback):
    """Starts the reduction at the beginning of each step, and acts at its end. All ranks have the same flags.

    They are `flags`, and each `RankFlag` among a Trainer's `callbacks`.
    """

    def __init__(self, flags: Sequence[RankFlag], callbacks: Sequence[object] = ()) -> None:
        self._given, self._callbacks = flags, callbacks
        self._flags = list(flags)
        self._group: ControlGroup | None = None
        self._values: list[int] = []
        self._wait: Callable[[], list[int]] | None = None
        """Waits for the reduction that runs; None: there is one rank."""

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Find the flags, and make the group. A collective."""
        self._flags = [*self._given, *(callback for callback in self._callbacks if isinstance(callback, RankFlag))]
        self._group = control_group()

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Start the reduction."""
        self._values = [flag.flag() for flag in self._flags]
        if self._group is not None:
            self._wait = self._group.begin_largest(self._values)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Act upon the flags."""
        if self._wait is not None:
            self._values = self._wait()
        for flag, value in zip(self._flags, self._values, strict=True):
            if value:
                flag.on_flag(value, state, control)


def stop_after_step(state: TrainerState, control: TrainerControl) -> bool:
    """Let a run save and stop; False: it ends anyhow."""
    if control.should_training_stop or state.global_step >= state.max_steps:
        return False
    control.should_save = control.should_training_stop = True
    return True
