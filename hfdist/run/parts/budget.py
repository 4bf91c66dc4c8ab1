"""What a run uses, and the budgets at which it stops."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import TrainerCallback

from hfdist.run.budget import Budget
from hfdist.run.parts.part import Joins, Part
from hfdist.run.state import RunState
from hfdist.run.usage import Usage


class UsagePart(Part):
    """Measures energy and cost."""

    joins = Joins.constructor

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Set `run.usage`, whose figures each training line has."""
        run.usage = Usage(run.recorder, run.config.cost, run.arguments.device)
        return [run.usage]


class BudgetPart(Part):
    """Stops the run at the first of its budgets."""

    joins = Joins.training

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Set `run.budget`, which knows afterwards whether it has stopped the run."""
        assert run.trainer.engine is not None
        run.budget = Budget(
            run.config,
            run.usage,
            run.recorder,
            num_parameters=run.trainer.engine.size.num_parameters,
            num_held_out=len(run.data.held_out or ()),
        )
        return [run.budget]
