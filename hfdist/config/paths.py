"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def in_home(path: str | Path) -> Path:
    """Expand `~`. That of a user who is not there stays as it is, and is refused as any path that is not there.

    `Path.expanduser` raises a RuntimeError for it.
    """
    return Path(os.path.expanduser(path))
