"""Where the rows of a file lie, found by reading it once and kept on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from hfdist.data.cache.arrays import load_array, save_array
from hfdist.data.cache.files import write_atomically
from hfdist.data.sources.base import ContentError, local_identity
from hfdist.data.storage.datafile import DataFile


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
    index = load_array(path)
    if index is not None:
        return index
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        refused = _load_refusal(refusal)
        if refused is not None:
            raise refused
        # Another process may have made it meanwhile.
        index = load_array(path)
        return _make(path, refusal, make) if index is None else index


def _load_refusal(path: Path) -> ContentError | None:
    try:
        return ContentError(**json.loads(path.read_bytes()))
    # Not there, or damaged.
    except (OSError, ValueError, TypeError):
        return None


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
    save_array(path, index)
    return index
