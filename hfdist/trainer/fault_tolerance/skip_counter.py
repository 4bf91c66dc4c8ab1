"""How many skipped steps and rollbacks a run bears, and how many there were."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much a run bears; see `train.*`."""

    skipped_steps: int = 3
    """Steps skipped in a row, after which the run goes back to its last checkpoint."""
    rollbacks: int = 2
    """Rollbacks without progress, after which the run stops."""
    compare_replicas_every: int | None = 100
    """Steps between comparisons; None: none."""


class Skipped(NamedTuple):
    """A step that no rank has taken."""

    step: int
    data_ranks: tuple[int, ...]
    """Data ranks whose loss was not finite; none: the losses were finite, and the gradient was not."""
    end_sample: int
    """The number of sequences that the run had read after this step."""

    def __str__(self) -> str:
        if not self.data_ranks:
            return "its gradient is not finite, though its loss is"
        ranks = f"rank{'s' * (len(self.data_ranks) > 1)} {', '.join(map(str, self.data_ranks))}"
        return f"its loss is not finite on data {ranks}"


@dataclass
class SkipCounter:
    """Counts steps that were skipped in a row, and rollbacks without progress.

    Progress: a step is taken that lies beyond every step at which the run went back.
    """

    limits: Tolerance
    skipped: list[Skipped] = field(default_factory=list)
    """Steps that were skipped in a row, up to now."""
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
    def may_roll_back(self) -> bool:
        """Whether the run may try once more."""
        return self.rollbacks < self.limits.rollbacks

    def roll_back(self, step: int) -> None:
        """Note that the run has gone back, since it could not go on after `step`."""
        self._failed_step = max(self._failed_step, step)
        self.rollbacks += 1
        self.skipped = []
