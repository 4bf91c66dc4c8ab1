"""The end of a run: held-out loss and export on all ranks, then what its parts do on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from hfdist.checkpoint.folder import step_name
from hfdist.collectives import gather_json
from hfdist.config.run import Export
from hfdist.run.export.deliver import deliver
from hfdist.run.parts.part import Part
from hfdist.run.peak_memory import largest_peaks
from hfdist.run.state import Outcome, RunState
from hfdist.trainer.checkpointing.log_history import held_out_loss_of
from hfdist.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def finish(run: RunState, parts: Sequence[Part]) -> None:
    """Evaluate and export, then let each part finish on rank 0. All ranks call it."""
    trainer = run.trainer
    peaks = gather_json(largest_peaks(trainer.args.device))
    reports = trainer.checkpointer.data.reports()
    loss, step = None, trainer.state.global_step
    if run.data.held_out is not None:
        loss = held_out_loss_of(trainer.state)
        loss = float(trainer.evaluate()["eval_loss"]) if loss is None else loss
    if run.config.evaluate.export is Export.best:
        loss, step = _take_best(trainer, loss)
    folder = deliver(trainer, run.config, run.patient)
    run.outcome = Outcome(folder, step, loss, reports, peaks)
    run.usage.read()
    if trainer.is_world_process_zero():
        for part in parts:
            part.finish(run)
    _wait_for_rank_zero(run)


def stop(run: RunState, parts: Sequence[Part]) -> None:
    """Let each part do on rank 0 what a run that a signal has stopped must not leave undone. All ranks call it."""
    if run.config.checkpoint.mirror is None:
        # Nothing is left to do, and ranks need not meet.
        return
    with run.preemption.hearing_again():
        if run.trainer.is_world_process_zero():
            for part in parts:
                part.stop(run)
        _wait_for_rank_zero(run)


def _wait_for_rank_zero(run: RunState) -> None:
    if run.patient is not None:
        # Ranks that leave early would take the launcher down while rank 0 is still busy, which may last hours.
        run.patient.gather(b"")
    if dist.is_initialized() and "nccl" in dist.get_backend():
        # Under gloo a rank now and then hangs here, while its peers take the same connections down: the end of the
        # process closes them as well.
        run.trainer.end()


def _take_best(trainer: Trainer, last_loss: float | None) -> tuple[float | None, int]:
    """Put the weights of the best checkpoint into the model; give their held-out loss and step."""
    best, last_step = trainer.checkpointer.folder.find_best(), trainer.state.global_step
    if best is None:
        logger.warning("no checkpoint was evaluated: the model is that of the last step")
        return last_loss, last_step
    path, loss = best
    if path.name == step_name(last_step) or (last_loss is not None and last_loss <= loss):
        logger.info("the best model is that of the last step")
        return last_loss, last_step
    logger.info("the best checkpoint is %s", path.name)
    trainer.checkpointer.restore_weights(path)
    return loss, int(path.name.removeprefix("step-"))
