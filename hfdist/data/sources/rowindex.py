"""Where the rows of a file lie, found by reading it once and kept on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from hfdist.data.files import write_atomically
from hfdist.data.sources.base import ContentError, local_identity
from hfdist.data.storage.datafile import DataFile

# Larger ones are mapped: a corpus may have more files than a process may have mappings.
_LARGEST_LOADED_BYTES = 1 << 20


def cached_index(
    folder: Path, file: DataFile, identity: str, make: Callable[[], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Give what `make` gives for a file, from the cache where it is there; so are its complaints.

    A second start needs no look at the file, which may have to be fetched from far away.

    Raises:
        ContentError: what `make` raised, now or earlier.
    """
    # Identity alone is of the ends of a file, so that another version is another entry.
    key = hashlib.blake2b(local_identity(identity, file).encode(), digest_size=16).hexdigest()
    path, refusal = folder / "index" / f"{key}.npy", folder / "index" / f"{key}.json"
    index = _load(path)
    if index is not None:
        return index
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if refusal.is_file():
            raise ContentError(**json.loads(refusal.read_bytes()))
        # Another process may have made it meanwhile.
        index = _load(path)
        return _make(path, refusal, make) if index is None else index


def _load(path: Path) -> NDArray[np.int64] | None:
    try:
        mode: Literal["r"] | None = "r" if path.stat().st_size > _LARGEST_LOADED_BYTES else None
        index: NDArray[np.int64] = np.load(path, mmap_mode=mode, allow_pickle=False)
    # Not there, or cut off when the machine stopped.
    except (OSError, ValueError, EOFError):
        return None
    return index


def _make(path: Path, refusal: Path, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    try:
        index = make()
    except ContentError as error:
        texts = {"what": error.what, "where": error.where, "allowed": error.allowed, "hint": error.hint}
        found = None if error.found is None else str(error.found)
        content = json.dumps(texts | {"found": found}).encode()

        def write(out: BinaryIO) -> None:
            out.write(content)

        write_atomically(refusal, write)
        raise
    write_atomically(path, lambda out: np.save(out, index, allow_pickle=False))
    return index
