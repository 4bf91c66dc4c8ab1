"""The file of where each lane of the data stands, as columns of whole numbers: for JSON they may be too many."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hfdist.checkpoint.manifest import DamagedError, Manifest, inside, read_manifest
from hfdist.checkpoint.safetensors_io import read_header_length
from hfdist.checkpoint.save_plan import TRAINING_STATE
from hfdist.errors import CheckpointError, named_line

LANES_FILE = f"{TRAINING_STATE}/lanes.safetensors"

_MAX_BYTES = 2**30
"""Most bytes of the file, written or read: 40 times as many as 16,384 lanes of 100 sources have."""
_MAX_HEADER_BYTES = 2**16
_TYPES = ("U8", "U16", "U32", "U64")


def write_lanes(folder: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Write unsigned columns; a CheckpointError: they are more than `read_lanes` takes."""
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
    # Not the library's own writing to a file: that hides it from others, and a full disk is no OSError there.
    (folder / LANES_FILE).write_bytes(save(dict(columns)))


def read_lanes(path: Path, manifest: Manifest | None = None) -> dict[str, NDArray[Any]] | None:
    """Read the columns of a checkpoint, in this process; None: it has none, as those from before this file.

    Args:
        path: the checkpoint; its hashes are not checked again here.
        manifest: that of the checkpoint, if it was read; else it is read.

    Raises:
        DamagedError: a file that is far too large, or not of unsigned columns.
    """
    if LANES_FILE not in (read_manifest(path) if manifest is None else manifest).files:
        return None
    file = inside(path, LANES_FILE)
    try:
        # Before the library takes memory for what it says.
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
