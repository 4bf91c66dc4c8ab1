"""Modules that users import by an older name: they keep working for one release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Give the `__getattr__` of a module that stands under another name now."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    return find
