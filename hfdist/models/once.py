"""Makes a folder of the cache once on a machine, however many processes ask for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from hfdist.errors import ResourceError


def make_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Give a folder with all its files; the first process of the machine that asks makes it, while the others wait.

    Args:
        folder: the folder.
        write: fills an empty folder, which is then given its name.

    Returns:
        `folder`.

    Raises:
        ResourceError: the folder cannot be written.
    """
    try:
        return _make(folder, write)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(folder.parent):
            # `write` could not read a file of its own: that is not the cache's fault.
            raise
        what, hint = f"the cache cannot be written: {error.strerror or error}", "data.cache_dir=FOLDER on a larger disk"
        raise ResourceError(what, where="data.cache_dir", found=folder.parent, hint=hint) from error


def _make(folder: Path, write: Callable[[Path], None]) -> Path:
    """Make the folder under a lock, unless it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # A program that cleans caches may leave an empty folder.
        if not folder.is_dir() or not any(folder.iterdir()):
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                write(temporary)
                # mkdtemp lets no other user in.
                temporary.chmod(0o755)
                os.replace(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder
