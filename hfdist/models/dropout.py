"""Dropout of a model, switched off: where what it says of a text is compared, chance would make a difference."""

from __future__ import annotations

from torch import nn


def switch_off_dropout(model: nn.Module) -> None:
    """Set all probabilities of dropout to 0, those that modules keep as numbers, too; in place."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)
