"""Early stopping: a pure function of the held-out losses so far, which each checkpoint keeps anyway."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.trainer.checkpointing.log_history import newest_losses

logger = logging.getLogger(__name__)


def num_without_improvement(losses: Sequence[float], min_delta: float) -> int:
    """Count the last evaluations that were not lower than the best before them, by `min_delta` at least.

    A loss that is not finite is no improvement. What improves by less is not the best: many small steps add up.
    """
    best, since = float("inf"), 0
    for loss in losses:
        if loss < best and best - loss >= min_delta:
            best, since = loss, 0
        else:
            since += 1
    return since


class EarlyStopping(TrainerCallback):
    """Ends the training on all ranks after the same evaluation: all have the same losses.

    transformers' own keeps a counter that our checkpoints would have to carry and a run that goes back to turn back;
    the newest losses are in `state.log_history`, which both already do.

    Args:
        patience: evaluations in a row without an improvement; less than `NUM_ENTRIES`.
        min_delta: by how much a loss must at least be lower than the best.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        self._patience, self._min_delta = patience, min_delta

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """A run that goes on where it had stopped is over."""
        if self._is_over(state):
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Stop, with a checkpoint."""
        if not self._is_over(state) or state.global_step >= state.max_steps:
            return
        control.should_training_stop = True
        control.should_save = args.save_strategy != "no"
        logger.info(
            "stopping at step %d: %d evaluations in a row without a lower held-out loss (min_delta %g)",
            *(state.global_step, self._patience, self._min_delta),
        )

    def _is_over(self, state: TrainerState) -> bool:
        return num_without_improvement(newest_losses(state.log_history), self._min_delta) >= self._patience
