"""Several optimizers stepped as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Group = dict[str, Any]
"""A group of parameters, as torch's optimizers have them: `params`, and settings."""

_PART = "part"
"""Key in a group of parameters: which of the optimizers steps it."""


class Joined(torch.optim.Optimizer):
    """Several optimizers as one: groups and state are kept here, so schedules, checkpoints and DeepSpeed see one.

    Args:
        parts: at least one; their groups may be empty.
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
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step each optimizer once."""
        loss = run_closure(closure)
        for part, groups in groups_by_optimizer(self, self.param_groups):
            # Each time: who loads or wraps an optimizer replaces its groups and state.
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss

    def __repr__(self) -> str:
        return " and ".join(type(part).__name__ for part in self.parts)


def groups_by_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[Group]
) -> list[tuple[torch.optim.Optimizer, list[Group]]]:
    """Give each optimizer with the groups that it steps; an optimizer that is not `Joined` steps all."""
    if not isinstance(optimizer, Joined):
        return [(optimizer, groups)]
    return [
        (part, [group for group in groups if group[_PART] == number]) for number, part in enumerate(optimizer.parts)
    ]


def run_closure(closure: Callable[[], object] | None) -> Any:
    """Give the loss of a step's closure, with gradients; None: there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
