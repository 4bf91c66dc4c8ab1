"""Several optimizers as one: each steps its own groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_PART = "part"
"""In a group: which of the optimizers steps it."""


class Joined(torch.optim.Optimizer):
    """Groups and state are kept here, so that schedules, checkpoints and DeepSpeed see one optimizer.

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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each of them once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, groups in of_parts(self, self.param_groups):
            # Each time: whoever loads or wraps an optimizer puts others in their place.
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss

    def __repr__(self) -> str:
        return " and ".join(type(part).__name__ for part in self.parts)


def of_parts(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]]:
    """Give the optimizers that step these groups, each with its own; of one alone, all."""
    if not isinstance(optimizer, Joined):
        return [(optimizer, groups)]
    return [
        (part, [group for group in groups if group[_PART] == number]) for number, part in enumerate(optimizer.parts)
    ]
