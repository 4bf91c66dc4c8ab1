"""The checkpoint's file of the places up to which the data's lanes are read: columns of whole numbers, not JSON.

A run of many lanes and sources has millions of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hfdist.checkpoint.manifest import DamagedError, Manifest, inside, read_manifest
from hfdist.checkpoint.safetensors_io import read_header_length
from hfdist.checkpoint.save_plan import TRAINING_STATE
from hfdist.errors import CheckpointError, named_line

LANES_FILE = f"{TRAINING_STATE}/lanes.safetensors"

_MAX_BYTES = 2**30
"""The most bytes of the file, written or read: 40 times as many as 16,384 lanes of 100 sources have."""
_MAX_HEADER_BYTES = 2**16
_TYPES = ("U8", "U16", "U32", "U64")
"""Types of columns that are read, as safetensors spells them."""


def write_lanes(folder: Path, columns: Mapping[str, NDArray[np.unsignedinteger[Any]]]) -> None:
    """Write columns of numbers without a sign into a checkpoint, by name.

    Raises:
        CheckpointError: they have more bytes than `read_lanes` takes.
    """
    num_bytes = sum(column.nbytes for column in columns.values())
    if num_bytes + _MAX_HEADER_BYTES > _MAX_BYTES:
        raise CheckpointError(
            "the places of the lanes are too many to be read again, so the checkpoint is not written",
            where=LANES_FILE,
            found=f"{num_bytes:,} bytes",
            allowed=f"{_MAX_BYTES:,} bytes",
            hint="the checkpoints before it stay; the file grows with data.lanes times the number of sources",
        )
    (folder / LANES_FILE).parent.mkdir(exist_ok=True)
    # Not by the library's `save_file`: there a full disk is no OSError, and other users cannot read the file.
    (folder / LANES_FILE).write_bytes(save(dict(columns)))


def read_lanes(path: Path, manifest: Manifest | None = None) -> dict[str, NDArray[np.unsignedinteger[Any]]] | None:
    """Read the columns of a checkpoint, in this process.

    Args:
        path: the checkpoint; its hashes are not checked again here.
        manifest: its manifest; None: it is read.

    Returns:
        Columns by name; None: the checkpoint has no such file, as older ones.

    Raises:
        DamagedError: the file is far too large, or has other columns than those of numbers without a sign.
    """
    manifest = manifest or read_manifest(path)
    if LANES_FILE not in manifest.files:
        return None
    file = inside(path, LANES_FILE)
    try:
        # Sizes first: the library takes as much memory as the file says.
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        with file.open("rb") as opened:
            read_header_length(opened, _MAX_HEADER_BYTES)
        with safe_open(file, framework="np") as columns:
            names = list(columns.keys())
            if any(columns.get_slice(name).get_dtype() not in _TYPES for name in names):
                raise ValueError("a column is not of unsigned numbers")
            return {name: columns.get_tensor(name) for name in names}
    except (SafetensorError, ValueError, TypeError) as error:
        what = "the places of the lanes are damaged"
        raise DamagedError("lanes", what, where=file, found=named_line(error)) from error
