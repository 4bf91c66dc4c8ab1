"""`adapter.*`: a few weights of PEFT's beside a frozen model, instead of training all of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hfdist.config.ranges import limited

ALL_LINEAR = "all-linear"
"""A target: every linear layer but the head."""


@dataclass(kw_only=True)
class AdapterConfig:
    """Adapters of the `peft` library that sit in a model's layers."""

    type: str | None = None
    path: str | None = None
    rank: int | None = limited(None, at_least=1)
    alpha: int | None = limited(None, at_least=1)
    dropout: float = limited(0.0, at_least=0, at_most=1)
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    target_pattern: str | None = None
    modules_to_save: list[str] = field(default_factory=list)
    rslora: bool = False
    dora: bool = False
    merge: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether there is an adapter at all."""
        return self.type is not None or self.path is not None
