"""Folders of the cache that are made once on a machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from hfdist.errors import ResourceError


def make_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Give the folder that `write` fills, whole: the first process of the machine calls it, while the others wait.

    Raises:
        ResourceError: the folder cannot be written.
    """
    try:
        return _make(folder, write)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(folder.parent):
            # The error is that of a file which `write` reads.
            raise
        what, hint = f"the cache cannot be written: {error.strerror or error}", "data.cache_dir=FOLDER on a larger disk"
        raise ResourceError(what, where="data.cache_dir", found=folder.parent, hint=hint) from error


def _make(folder: Path, write: Callable[[Path], None]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # An empty one is what a cleaner of caches leaves.
        if not folder.is_dir() or not any(folder.iterdir()):
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                write(temporary)
                temporary.chmod(0o755)
                os.replace(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder
