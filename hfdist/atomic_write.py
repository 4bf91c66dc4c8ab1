"""Replace a file whole, so that a reader sees the old one or the new one, and no half."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import BinaryIO

_UNFINISHED = ".tmp"


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], None], *, is_durable: bool = True) -> None:
    """Write bytes, or let a function fill the file; it takes its name when it is whole, and all users may read it.

    Args:
        path: the file; others may write it at the same time, and the last one stays.
        content: the bytes, or what writes them.
        is_durable: have the bytes on the disk before the name is; without it, a machine that stops may leave an empty
            file.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=_UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove what processes have left that were killed in `write_atomically` of this file. None may be writing it."""
    for left in path.parent.glob(f"{escape(path.name)}.*{_UNFINISHED}"):
        left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the list of names of a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
