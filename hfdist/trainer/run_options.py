"""What a run asks of its Trainer besides TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from hfdist.config.composition.python_words import speaking_python
from hfdist.models.loss import LossHead
from hfdist.trainer.checkpointing.save_options import SaveOptions
from hfdist.trainer.evaluation.loop import Measure
from hfdist.trainer.fault_tolerance.skip_counter import Tolerance
from hfdist.trainer.island.parameter_island import ServerOptimizer
from hfdist.trainer.step.objective import Objective


@dataclass(frozen=True, kw_only=True)
class RunOptions(SaveOptions):
    """What a run asks of its Trainer besides TrainingArguments; the defaults are those of a Trainer from Python."""

    objective: Objective | None = None
    """What is trained in place of the model's own loss; None: that one."""
    loss_head: LossHead | None = None
    """Computes training losses without whole logits; None: the model computes them."""
    base_width: int | None = None
    """Width (`hidden_size`) of the model in which the learning rate was found; None: it was found in this one."""
    limits: Tolerance = field(default_factory=Tolerance)
    """How many steps may be skipped, and how often the run goes back."""
    measures: Sequence[Measure] = ()
    """What each evaluation measures besides the loss."""
    figures: Callable[[], dict[str, float]] = dict
    """What each training line says besides; called on all ranks together."""
    server_optimizer: ServerOptimizer | None = None
    """How a parameter server steps the optimizer; None: there is no parameter server."""

    def telling(self) -> AbstractContextManager[None]:
        """Tell mistakes of the block in keys where a run has a config, else in arguments of Python."""
        return nullcontext() if self.is_run else speaking_python()
