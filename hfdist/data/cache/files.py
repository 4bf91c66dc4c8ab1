"""Files of the data room: writing into the shared cache, and names in it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock


def write_once(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a file of the shared cache, unless it is there.

    All processes of a machine come here at once: the first writes, the others wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            write_atomically(path, write)


def digest_of(values: Sequence[Any]) -> str:
    """Hash of what JSON can hold, for names in caches and for identities."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a new file, which takes its name only when it is whole; readable by all who share the cache."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            # Its name must not reach the disk before its bytes: a machine that stops would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
