"""Steps whose numbers are not finite are skipped, on all ranks alike; too many in a row take the run back.

No extra message is needed: a loss that is not finite makes every gradient of its rank NaN, and the norm is computed
from gradients that are summed over all ranks.

    begin_step -> judge: is the norm finite? --yes-> the optimizer steps -> end_step: the counter begins at 0 again
                                             --no--> the optimizer has no gradients
                                                  -> end_step: schedule and mean loss go back, the skip is counted
                                                     too many -> back to the last checkpoint, or a NumericsError
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hfdist.checkpoint import Replicas
from hfdist.collectives import gather_json, world_size
from hfdist.errors import NumericsError
from hfdist.optim.rates import rate_of, set_rate
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.checkpointing.find import first_sound
from hfdist.trainer.checkpointing.trainer_state import read_trainer_state
from hfdist.trainer.fault_tolerance.bit_comparison import find_differences
from hfdist.trainer.fault_tolerance.skip_counter import SkipCounter, Skipped, Tolerance
from hfdist.trainer.fault_tolerance.why_it_ends import too_many_skipped, unequal_replicas
from hfdist.trainer.step.step_lines import OnRollback
from hfdist.trainer.training import Training
from hfdist.watch.callback import watches_among
from hfdist.watch.heartbeat import SAVING

logger = logging.getLogger(__name__)

LEAST_LOSS_SCALE = 1.0
"""Under fp16, gradients that overflow even at this scale are not the scale's fault."""
# What steps change in the Trainer's state; the rest is settings.
_STATE_OF_STEPS = ("global_step", "epoch", "log_history", "num_input_tokens_seen", "total_flos",
                   "best_metric", "best_global_step", "best_model_checkpoint")  # fmt: skip


def propagate_nan(loss: torch.Tensor) -> torch.Tensor:
    """Give the same loss and the same gradients, bit by bit; if the loss is not finite, all gradients become NaN.

    An infinite loss may have finite gradients, and then the other ranks would never know.
    """
    value = loss.detach()
    # The factor is exp(0) = 1, or NaN: inf - inf is NaN. A number of Python would cost a new tensor.
    return loss * (value - value).exp_()


class NonfiniteGuard:
    """Watches the steps of one training.

    Args:
        training: the handle on the Trainer.
        checkpointer: saves the training, and restores it when the run goes back.
        limits: how many steps may be skipped, and how often the run may go back.
        replicas: the checkpoints in memory; None: there are none.
        came_from: the checkpoint at which the training began; None: it began anew.
        log_skipped: logs the line of a skipped step, which counts for no figure of the routers. A collective.
    """

    def __init__(
        self,
        training: Training,
        checkpointer: Checkpointer,
        limits: Tolerance,
        *,
        replicas: Replicas | None,
        came_from: Path | None,
        log_skipped: Callable[[], None],
    ) -> None:
        self._training, self._checkpointer = training, checkpointer
        self._replicas, self._came_from, self._log_skipped = replicas, came_from, log_skipped
        self._counter = SkipCounter(limits)
        self._is_finite: bool | None = None
        """Whether the step's gradients are finite; None: there was no step since the last `end_step`."""
        self.was_taken = False
        """Whether the optimizer took the last step; a step that overflows in fp16 is not taken. On all ranks alike."""
        self._loss_before: torch.Tensor | None = None
        self._schedule_before: dict[str, object] = {}
        self._rates_before: list[float] = []
        self._owes_evaluation = self._owes_save = False
        """Whether an evaluation or a save fell on a skipped step; it is done after the next step that is taken."""

    @property
    def is_sound(self) -> bool:
        """Whether no step was skipped since the last that was taken, so that the state is worth keeping."""
        return not self._counter.skipped

    def begin_step(self) -> None:
        """Remember what a skipped step must not change."""
        self._loss_before = self._training.trainer._tr_loss.clone()

    def judge(self, grad_norm: torch.Tensor | float | None) -> None:
        """Leave the optimizer nothing to step with, if the gradients are not finite.

        The norm is the same on all ranks. DeepSpeed has skipped the step already.
        """
        norm = 0.0 if grad_norm is None else float(grad_norm)
        # DeepSpeed's kernels also give -1 for a norm that is not finite.
        self._is_finite = math.isfinite(norm) and norm >= 0
        if not self._is_finite:
            scheduler = self._training.schedule
            self._schedule_before = copy.deepcopy(scheduler.state_dict())
            self._rates_before = [rate_of(group) for group in scheduler.optimizer.param_groups]
            # Optimizers pass over parameters without gradients: no moment, step count or weight decay moves.
            self._training.optimizer.zero_grad(set_to_none=True)
            self._training.model.zero_grad(set_to_none=True)

    def end_step(self) -> bool:
        """See what became of the step; give whether the run has gone back, so nothing is logged, evaluated or saved.

        A NumericsError says that it cannot go back, or has done so too often.
        """
        is_finite, self._is_finite = self._is_finite, None
        self.was_taken = bool(is_finite)
        if is_finite is None:
            return False
        step = self._training.state.global_step
        return self._end_taken_step(step) if is_finite else self._end_skipped_step(step)

    def _end_taken_step(self, step: int) -> bool:
        """Give whether the run has gone back, as replicas of the weights are no longer equal."""
        control = self._training.control
        control.should_evaluate |= self._owes_evaluation
        control.should_save |= self._owes_save
        if self._owes_evaluation or self._owes_save:
            self._owes_evaluation = self._owes_save = False
            self._tell_watches()
        every = self._counter.limits.compare_replicas_every
        # Also before each save: where replicas differ, the last checkpoint must be one of equal replicas.
        is_kept = control.should_save or self._checkpointer.replicates_at(step)
        is_due = every is not None and (step % every == 0 or is_kept) and world_size() > 1
        differences = find_differences(self._training.engine.whole_parameters()) if is_due else []
        for line in differences:
            logger.warning("after step %d the replicas are not equal: %s", step, line)
        if differences:
            return self._roll_back(step, partial(unequal_replicas, self._training, self._counter, step, differences))
        self._counter.take(step)
        return False

    def _end_skipped_step(self, step: int) -> bool:
        """Give whether the run has gone back, as too many steps in a row were skipped."""
        training = self._training
        self._put_schedule_back()
        data_ranks = self._find_bad_data_ranks()
        if training.args.fp16 and not data_ranks and self._loss_scale() > LEAST_LOSS_SCALE:
            # An overflow is how the loss scale finds its limit.
            return False
        skipped = Skipped(step=step, data_ranks=data_ranks, end_sample=training.num_samples())
        self._leave_out_of_mean_loss()
        logger.warning("step %d is skipped: %s", step, skipped)
        self._log_skipped()
        if not training.control.should_training_stop:
            self._put_off_evaluation_and_save()
        is_too_many = self._counter.skip(skipped)
        return is_too_many and self._roll_back(step, partial(too_many_skipped, training, self._counter))

    def _put_schedule_back(self) -> None:
        schedule = self._training.schedule
        schedule.load_state_dict(self._schedule_before)
        for group, rate in zip(schedule.optimizer.param_groups, self._rates_before, strict=True):
            set_rate(group, rate)

    def _find_bad_data_ranks(self) -> tuple[int, ...]:
        """Give the data ranks whose own loss is not finite, in their order. A collective."""
        is_finite = bool(torch.isfinite(self._training.trainer._tr_loss))
        bad_here = None if is_finite else self._training.strategy.topology.data_rank
        return tuple(sorted({data_rank for data_rank in gather_json(bad_here) if data_rank is not None}))

    def _leave_out_of_mean_loss(self) -> None:
        """Take the step's loss out of the sum that the next training line divides, and the step out of its steps."""
        trainer = self._training.trainer
        assert self._loss_before is not None
        trainer._tr_loss.copy_(self._loss_before)
        trainer._globalstep_last_logged += 1

    def _put_off_evaluation_and_save(self) -> None:
        """Keep the last checkpoint until a step is taken: it was written before anything went wrong."""
        control = self._training.control
        self._owes_evaluation |= control.should_evaluate
        self._owes_save |= control.should_save
        control.should_evaluate = control.should_save = False
        self._tell_watches()

    def _tell_watches(self) -> None:
        """Let the watches see what follows the step now: they looked before this guard changed it."""
        for watch in watches_among(self._training.callbacks):
            watch.look_ahead(self._training.control)

    def _loss_scale(self) -> float:
        """The loss scale, as long as it may fall; one that is fixed, or as low as it may be, gives the least."""
        scaler = self._training.accelerator.scaler
        if scaler is not None:
            return float(scaler.get_scale())
        # DeepSpeed has a scaler of its own.
        scaler_state = self._training.engine.extra_state()["loss_scaler"]
        may_fall = scaler_state["dynamic"] and scaler_state["cur_scale"] > scaler_state["min_scale"]
        return float(scaler_state["cur_scale"]) if may_fall else LEAST_LOSS_SCALE

    # ---- going back ----

    def _roll_back(self, step: int, failure: Callable[[], NumericsError]) -> bool:
        """Go back to the last checkpoint, and give True; raise what `failure` makes where that cannot be."""
        has_checkpoint = self._checkpointer.folder.has_own or self._came_from is not None
        can_roll_back = has_checkpoint and self._counter.may_roll_back and self._training.stream is not None
        checkpoint = self._find_checkpoint() if can_roll_back else None
        if checkpoint is None:
            # For the audit, which the hints name; a start from the last checkpoint cuts it off again.
            self._checkpointer.data.write_ledger()
            raise failure()
        self._counter.roll_back(step)
        self._owes_evaluation = self._owes_save = False
        if self._replicas is not None:
            # Before the data go back: what was kept after the checkpoint is no state of this run any more.
            moved = self._replicas.begin_line(checkpoint) or checkpoint
            if checkpoint == self._came_from:
                # The run may go back to it once more.
                self._came_from = moved
            checkpoint = moved
        self._restore(checkpoint)
        logger.warning(
            "going back from step %d to %s (%d of at most %d times without progress)",
            *(step, checkpoint, self._counter.rollbacks, self._counter.limits.rollbacks),
        )
        return True

    def _find_checkpoint(self) -> Path | None:
        """Give the newest checkpoint of this training that verifies, or the one it began with; None: there is none."""
        for watch in watches_among(self._training.callbacks):
            # Checkpoints are verified and read, which may take as long as a save.
            watch.progress.exempt = SAVING
        newest, came_from = self._checkpointer.find_own(), self._came_from
        if newest is not None or came_from is None:
            return newest
        # Each machine has a part of a replica.
        if not all(gather_json(came_from.is_dir())):
            return None
        is_replica = self._replicas is not None and self._replicas.holds(came_from)
        # What the folder has may have been damaged since.
        return came_from if is_replica else first_sound([str(came_from)])

    def _restore(self, checkpoint: Path) -> None:
        """Undo within the process what training has changed since `checkpoint`."""
        trainer, state, control = self._training.trainer, self._training.state, self._training.control
        self._checkpointer.restore(checkpoint)
        was_over = state.global_step >= state.max_steps
        saved = read_trainer_state(checkpoint)
        for name in _STATE_OF_STEPS:
            setattr(state, name, getattr(saved, name))
        # As at a resume, the next training line says nothing of the steps that are undone.
        trainer._tr_loss.zero_()
        trainer._total_loss_scalar = 0.0
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step
        self._training.restart_figures()
        control.should_log = control.should_evaluate = control.should_save = False
        if was_over:
            control.should_training_stop = False
        # The next epoch begins with a fresh iterator over the stream, which stands where the checkpoint left it.
        control.should_epoch_stop = True
        for callback in self._training.callbacks:
            if isinstance(callback, OnRollback):
                callback.on_rollback(state)
