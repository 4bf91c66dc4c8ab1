"""`Joined`: several optimizers that a Trainer, a schedule and a checkpoint see as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Group = dict[str, Any]
"""A group of parameters, as in torch's optimizers: a list of parameters under `params`, and settings by name."""

_PART = "part"
"""Key of a group: the number of the optimizer that steps it."""


class Joined(torch.optim.Optimizer):
    """One optimizer with the groups and the state of several, each of which steps its own groups.

    Args:
        parts: the optimizers, at least one; their groups may be empty.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        for number, part in enumerate(self.parts):
            for group in part.param_groups:
                group[_PART] = number
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:  # as torch has it: whatever a closure gives
        """Step each optimizer once, and give the loss of the closure; None: there is no closure."""
        loss = run_closure(closure)
        for part, groups in groups_by_optimizer(self, self.param_groups):
            # At each step: who loads or wraps an optimizer replaces its groups and state.
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss

    def __repr__(self) -> str:
        return " and ".join(type(part).__name__ for part in self.parts)


def groups_by_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[Group]
) -> list[tuple[torch.optim.Optimizer, list[Group]]]:
    """Deal groups to the optimizers that step them.

    Args:
        optimizer: a `Joined` optimizer, or any other one, which steps all groups itself.
        groups: its groups, or copies of these.

    Returns:
        Each optimizer with its groups.
    """
    if not isinstance(optimizer, Joined):
        return [(optimizer, groups)]
    return [
        (part, [group for group in groups if group[_PART] == number]) for number, part in enumerate(optimizer.parts)
    ]


def run_closure(closure: Callable[[], object] | None) -> Any:
    """Run the closure of a step with gradients enabled, and give its loss; None: there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
