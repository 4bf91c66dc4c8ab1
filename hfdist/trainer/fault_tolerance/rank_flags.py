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
        self._asked: list[int] | tuple[torch.Tensor, dist.Work] | None = None
        """What one process wants; or of several the largest wishes, which are on their way."""

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
        own = [listener.wish() for listener in self.listeners]
        if self._group is None:
            self._asked = own
            return
        wishes = torch.tensor(own, dtype=torch.int64)
        self._asked = wishes, dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Act."""
        assert self._asked is not None
        if isinstance(self._asked, list):
            agreed = self._asked
        else:
            wishes, work = self._asked
            work.wait()
            agreed = wishes.tolist()
        for listener, wish in zip(self.listeners, agreed, strict=True):
            if wish:
                listener.agreed(wish, state, control)
