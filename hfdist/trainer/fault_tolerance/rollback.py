"""Back to the last good checkpoint within the process: everything that training has changed since is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerState

from hfdist.checkpoint import find_newest
from hfdist.checkpoint.folder import step_of
from hfdist.trainer.checkpointing import checkpointer
from hfdist.trainer.reporting.callbacks import GoesBack
from hfdist.watch import SAVING, watches_among

# What steps change in the Trainer's state; the rest is settings.
_STATE_OF_STEPS = (
    "global_step",
    "epoch",
    "log_history",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


def find_way_back(trainer: Any, came_from: Path | None) -> Path | None:
    """Give the newest checkpoint of this training that verifies; None: there is none. Call on all ranks.

    Args:
        trainer: that has saved, or has come from a checkpoint.
        came_from: that one, perhaps of another run.
    """
    for watch in watches_among(trainer.callback_handler.callbacks):
        # Checkpoints are verified and read, which may take as long as a save.
        watch.progress.exempt = SAVING
    checkpointer.wait(trainer)
    newest = find_newest(checkpointer.folder_of(trainer))
    if newest is None:
        return came_from if came_from is not None and came_from.is_dir() else None
    # A later one is of another training that has used the folder.
    return newest if step_of(newest.name) <= trainer.state.global_step else None


def go_back(trainer: Any, checkpoint: Path) -> None:
    """Go on from `checkpoint` with the next step. Call on all ranks, at the end of a step."""
    checkpointer.restore(trainer, checkpoint)
    state, control = trainer.state, trainer.control
    was_over = state.global_step >= state.max_steps
    saved = TrainerState.load_from_json(str(checkpoint / checkpointer.TRAINER_STATE))
    for name in _STATE_OF_STEPS:
        setattr(state, name, getattr(saved, name))
    # As at a resume: loss and throughput of the end are told for the steps that follow.
    trainer._tr_loss.zero_()
    trainer._total_loss_scalar = 0.0
    trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step
    trainer.start_clock()
    control.should_log = control.should_evaluate = control.should_save = False
    if was_over:
        control.should_training_stop = False
    # The next epoch begins with a fresh iterator over the stream, which stands where the checkpoint left it.
    control.should_epoch_stop = True
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, GoesBack):
            callback.on_go_back(state)
