"""A folder of one process for what it needs while it runs; the next process removes it if this one is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "hfdist-generate-"
_NEW_SECONDS = 60.0
"""Age below which a folder is left alone: its process may not have locked it yet."""


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder in `parent` for the block, and remove it after the block.

    Folders that killed processes have left in `parent` are removed first.
    """
    for left in parent.glob(f"{_PREFIX}*"):
        # A folder of another user, or one in use.
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _NEW_SECONDS:
                _remove_unused(left)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # The system takes the lock away from a process that ends, however it does.
    lock = os.open(made, os.O_RDONLY)
    try:
        # Some network disks have no such locks: there, nothing is taken for left.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove a folder that no process has; OSError: one has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
