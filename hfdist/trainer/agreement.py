"""Once a step the ranks ask each other whether anyone wants something of all of them.

It is one reduction of a few numbers that runs beside the step, in a group of its own on the CPU: nobody waits for it,
and the GPU is not synchronised.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Listener(Protocol):
    """Somebody whose wish concerns all ranks."""

    def wish(self) -> int:
        """Say what this rank wants; 0: nothing. Of all ranks' wishes the largest counts."""

    def agreed(self, wish: int, state: TrainerState, control: TrainerControl) -> None:
        """Act upon a wish that is not 0, at the end of the same step on all ranks."""


class Agreement(TrainerCallback):
    """Asks at the beginning of each step, and acts at its end."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        """The same on all ranks, in the same order."""
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, dist.Work | None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Make the group. A collective."""
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Ask."""
        wishes = torch.tensor([listener.wish() for listener in self.listeners], dtype=torch.int64)
        work = None
        if self._group is not None:
            work = dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = wishes, work

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Act."""
        assert self._asked is not None
        wishes, work = self._asked
        if work is not None:
            work.wait()
        for listener, wish in zip(self.listeners, wishes.tolist(), strict=True):
            if wish:
                listener.agreed(wish, state, control)
