"""Modules that users import by an older name: they keep working for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "hfdist.config.adapter": "hfdist.config.model",
    "hfdist.config.command": "hfdist.config.cli.command",
    "hfdist.config.compose": "hfdist.config.composition.compose",
    "hfdist.config.pipeline": "hfdist.config.strategy",
    "hfdist.trainer.arguments": "hfdist.trainer.run.training_arguments",
    "hfdist.trainer.callbacks": "hfdist.trainer.reporting.callbacks",
    "hfdist.trainer.evaluation.metrics": "hfdist.trainer.evaluation.generation",
    "hfdist.trainer.metrics": "hfdist.trainer.evaluation.generation",
    "hfdist.verify.parity_runs": "hfdist.verify.parity",
}
"""Old name to new. A name stands here only when no file has it any more."""


class _OldNames(MetaPathFinder, Loader):
    """Makes an empty module for an old name, which takes each attribute from the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {old!r} has no attribute {name!r}")
            words = f"{old} is now {new}; the old name goes with the next release"
            warnings.warn(words, DeprecationWarning, stacklevel=2)
            return getattr(import_module(new), name)

        module.__getattr__ = find  # type: ignore[method-assign]


def accept_old_names() -> None:
    """Let Python ask here for modules that it finds nowhere else."""
    sys.meta_path.append(_OldNames())
