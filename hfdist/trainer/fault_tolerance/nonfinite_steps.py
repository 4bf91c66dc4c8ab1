"""Steps whose numbers are not finite are skipped, on all ranks alike; what does not pass takes the run back.

Nobody is asked: a loss that is not finite makes every gradient of its rank so, and the norm is computed from gradients
that are summed over all ranks.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hfdist.collectives import gather_json, world_size
from hfdist.data import TokenStream
from hfdist.errors import NumericsError
from hfdist.trainer.checkpointing import checkpointer
from hfdist.trainer.fault_tolerance.replicas import find_differences
from hfdist.trainer.fault_tolerance.rollback import find_way_back, go_back
from hfdist.trainer.fault_tolerance.skipped_step import Skipped, describe, quarantine_hint

logger = logging.getLogger(__name__)

LEAST_LOSS_SCALE = 1.0
"""Under fp16, gradients that overflow even at this scale are not the scale's fault."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a run bears; see `train.*`."""

    skipped_steps: int = 3
    """Skipped in a row, after which the run goes back to its last checkpoint."""
    rollbacks: int = 2
    """Without progress, after which the run stops."""
    compare_replicas_every: int | None = 100
    """Steps between comparisons; None: none."""


def spread(loss: torch.Tensor) -> torch.Tensor:
    """Give the same loss and the same gradients, bit by bit; of a loss that is not finite, gradients all of NaN.

    An infinite loss may have finite gradients, and then the other ranks would never know.
    """
    return loss * (1 + 0 * loss.detach())


@dataclass
class SkipCounter:
    """Counts steps that were skipped in a row, and rollbacks without progress.

    Progress is a step taken that is beyond all those at which the run had to go back.
    """

    limits: Limits
    skipped: list[Skipped] = field(default_factory=list)
    """In a row, up to now."""
    rollbacks: int = 0
    _failed_step: int = 0

    def take(self, step: int) -> None:
        """A step was taken."""
        self.skipped = []
        if step > self._failed_step:
            self.rollbacks = 0

    def skip(self, skipped: Skipped) -> bool:
        """A step was skipped; gives whether that is one too many."""
        self.skipped.append(skipped)
        return len(self.skipped) >= self.limits.skipped_steps

    @property
    def may_go_back(self) -> bool:
        """Whether the run may try once more."""
        return self.rollbacks < self.limits.rollbacks

    def go_back(self, step: int) -> None:
        """The run has gone back, since it could not go on behind `step`."""
        self._failed_step = max(self._failed_step, step)
        self.rollbacks += 1
        self.skipped = []


class NonfiniteGuard:
    """Watches the steps of one Trainer.

    Args:
        trainer: with an engine.
        limits: what it bears.
        came_from: the checkpoint at which this training began, if any.
    """

    def __init__(self, trainer: Any, limits: Limits, came_from: Path | None) -> None:
        self._trainer, self._came_from = trainer, came_from
        self._has_saved = False
        self._tally = SkipCounter(limits)
        self._is_finite: bool | None = None
        """Of the step's gradients; None: no step since the last look."""
        self._loss_before: torch.Tensor | None = None
        self._schedule_before: tuple[dict[str, Any], list[float]] | None = None
        self._put_off = (False, False)
        """An evaluation and a save that fell on skipped steps."""

    def begin_step(self) -> None:
        """Remember what a skipped step must not change."""
        self._loss_before = self._trainer._tr_loss.clone()

    def judge(self, grad_norm: Any) -> None:
        """Leave the optimizer nothing to step with, if the gradients are not finite.

        Args:
            grad_norm: of the gradients of all ranks, on each the same; DeepSpeed has skipped the step already.
        """
        norm = 0.0 if grad_norm is None else float(grad_norm)
        # DeepSpeed's kernels also say -1 for it.
        self._is_finite = math.isfinite(norm) and norm >= 0
        if not self._is_finite:
            scheduler = self._trainer.lr_scheduler
            rates = [group["lr"] for group in scheduler.optimizer.param_groups]
            self._schedule_before = copy.deepcopy(scheduler.state_dict()), rates
            # Optimizers pass over parameters without gradients: no moment, step count or weight decay moves.
            self._trainer.optimizer.zero_grad(set_to_none=True)

    def end_step(self) -> bool:
        """See what became of the step, before it is logged, evaluated and saved.

        Returns:
            Whether the run has gone back, so that nothing of this is to be done.

        Raises:
            NumericsError: it cannot go back, or has done so too often.
        """
        is_finite, self._is_finite = self._is_finite, None
        has_gone_back = is_finite is not None and self._settle(self._trainer.state.global_step, is_finite)
        self._has_saved |= self._trainer.control.should_save
        return has_gone_back

    def _settle(self, step: int, is_finite: bool) -> bool:
        if not is_finite:
            self._restore_schedule()
            skipped = self._find_fault(step)
            if skipped is None:
                return False
            self._leave_out(skipped)
            return self._tally.skip(skipped) and self._go_back(step, self._too_many_skipped)
        self._take_up()
        differences = self._compare_replicas(step)
        for line in differences:
            logger.warning("after step %d the replicas are not equal: %s", step, line)
        if differences:
            return self._go_back(step, lambda: self._unequal_replicas(step, differences))
        self._tally.take(step)
        return False

    def _restore_schedule(self) -> None:
        assert self._schedule_before is not None
        state, rates = self._schedule_before
        self._trainer.lr_scheduler.load_state_dict(state)
        for group, rate in zip(self._trainer.lr_scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _find_fault(self, step: int) -> Skipped | None:
        """Of a step without finite gradients; None: it is only how the loss scale of fp16 finds its limit."""
        trainer = self._trainer
        own = [trainer.strategy.topology.data_rank, bool(torch.isfinite(trainer._tr_loss))]
        data_ranks = tuple(sorted({data_rank for data_rank, is_finite in gather_json(own) if not is_finite}))
        if trainer.args.fp16 and not data_ranks and self._loss_scale() > LEAST_LOSS_SCALE:
            return None
        return Skipped(step=step, data_ranks=data_ranks, end_sample=checkpointer.num_samples(trainer))

    def _loss_scale(self) -> float:
        scaler = self._trainer.accelerator.scaler
        scale = self._trainer.engine.numbers()["loss_scaler"]["cur_scale"] if scaler is None else scaler.get_scale()
        return float(scale)

    def _leave_out(self, skipped: Skipped) -> None:
        """Keep a skipped step out of the mean loss, and put off what it would have evaluated and saved."""
        trainer, control = self._trainer, self._trainer.control
        trainer._tr_loss.copy_(self._loss_before)
        trainer._globalstep_last_logged += 1
        logger.warning("step %d is skipped: %s", skipped.step, skipped)
        trainer.log({"loss": None, "skipped": True})
        if not control.should_training_stop:
            # Until a step is taken, the last checkpoint is of before what is wrong.
            self._put_off = control.should_evaluate or self._put_off[0], control.should_save or self._put_off[1]
            control.should_evaluate = control.should_save = False

    def _take_up(self) -> None:
        control = self._trainer.control
        control.should_evaluate |= self._put_off[0]
        control.should_save |= self._put_off[1]
        self._put_off = False, False

    def _compare_replicas(self, step: int) -> list[str]:
        every = self._tally.limits.compare_replicas_every
        # Before each save, too: what is found later must have a sound checkpoint to go back to.
        is_due = every is not None and (step % every == 0 or self._trainer.control.should_save)
        return find_differences(self._trainer.engine.whole_parameters()) if is_due and world_size() > 1 else []

    def _go_back(self, step: int, failure: Callable[[], NumericsError]) -> bool:
        trainer = self._trainer
        checkpoint = find_way_back(trainer, self._came_from) if self._can_go_back() else None
        if checkpoint is None:
            # For the audit, which the hints name; a start from the last checkpoint cuts it off again.
            checkpointer.write_ledger(trainer)
            raise failure()
        self._tally.go_back(step)
        self._put_off = False, False
        go_back(trainer, checkpoint)
        logger.warning(
            "going back from step %d to %s (%d of at most %d times without progress)",
            *(step, checkpoint, self._tally.rollbacks, self._tally.limits.rollbacks),
        )
        return True

    def _too_many_skipped(self) -> NumericsError:
        skipped = self._tally.skipped
        return NumericsError(
            f"the loss or the gradient was not finite {len(skipped)} steps in a row, {self._why_no_way_back()}",
            where=f"step {skipped[0].step}",
            found=describe(self._trainer, skipped),
            hint=f"{quarantine_hint(self._trainer, skipped[0])}a lower optimizer.lr or train.max_grad_norm, a longer "
            "warm-up, or train.precision=fp32; checkpoints are from before it",
        )

    def _unequal_replicas(self, step: int, differences: list[str]) -> NumericsError:
        return NumericsError(
            f"ranks that hold the same parameters do not hold the same bits, {self._why_no_way_back()}",
            where=f"step {step}",
            found=tuple(differences),
            hint="leave the named host out: its memory or its device is likely faulty; on machines of different kinds, "
            "which round differently, train.compare_replicas_every=null",
        )

    def _can_go_back(self) -> bool:
        has_checkpoint = self._has_saved or self._came_from is not None
        return has_checkpoint and self._tally.may_go_back and isinstance(self._trainer.train_dataset, TokenStream)

    def _why_no_way_back(self) -> str:
        if not self._tally.may_go_back:
            return f"and the run has gone back {self._tally.rollbacks} times without getting beyond it"
        if not isinstance(self._trainer.train_dataset, TokenStream):
            return "and only a hfdist TokenStream can go back to a checkpoint while the run goes on"
        return "and there is no checkpoint to go back to"
