"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_user(path: str | Path) -> Path:
    """Expand `~`. `~name` of an unknown user stays as it is, and is refused like any path that is not there.

    `Path.expanduser` raises a RuntimeError for it.
    """
    return Path(os.path.expanduser(path))
