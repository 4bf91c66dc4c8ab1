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
    """PEFT's name of the method, such as `lora`; null: no new adapter."""
    path: str | None = None
    """A saved adapter (a PEFT folder or Hub id) to go on from. It says type, rank and targets itself."""
    rank: int | None = limited(None, at_least=1)
    """Null: PEFT's default of the type."""
    alpha: int | None = limited(None, at_least=1)
    """The adapter's output is scaled by alpha / rank; null: PEFT's default."""
    dropout: float = limited(0.0, at_least=0, at_most=1)
    """On the adapter's input."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the layers to adapt, or last parts of their names."""
    target_pattern: str | None = None
    """Instead of `targets`: a regular expression for whole names."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole besides and kept with the adapter, such as `lm_head`."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    dora: bool = False
    """Learn directions and lengths of weights apart."""
    merge: bool = True
    """Also write the model with the adapter merged into it, at the end."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further fields of PEFT's config class of the type, checked against it."""

    @property
    def is_used(self) -> bool:
        """Whether there is an adapter at all."""
        return self.type is not None or self.path is not None
