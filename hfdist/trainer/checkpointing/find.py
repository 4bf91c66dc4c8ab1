"""Finds a checkpoint to go on from: the newest of a folder, the first of several, or one that is given."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from hfdist.checkpoint import find_newest, verify_together
from hfdist.checkpoint.folder import list_checkpoints
from hfdist.checkpoint.manifest import MANIFEST
from hfdist.collectives import rank
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)


def newest_of(folder: Path) -> Path:
    """Give the newest checkpoint of a folder that verifies; CheckpointError: there is none. A collective."""
    found = find_newest(folder)
    if found is None:
        raise CheckpointError("there is no checkpoint to go on from", where=str(folder), hint="train() begins anew")
    return found


def check_is_checkpoint(path: Path) -> None:
    """Raise a CheckpointError that says what `path` is, if it is no checkpoint."""
    if not path.is_dir():
        raise CheckpointError(
            "there is no such checkpoint",
            where="resume_from_checkpoint",
            found=str(path),
            hint="resume_from_checkpoint=True takes the newest, if there is one",
        )
    if (path / MANIFEST).is_file():
        return
    # The folder of a run, or of its checkpoints.
    within = list_checkpoints(path) or list_checkpoints(path / "checkpoints")
    if any(path.glob("*.safetensors")):
        hint = "from_pretrained(FOLDER) for a model's folder, and train() without resume_from_checkpoint"
    elif within:
        hint = f"resume_from_checkpoint={str(within[-1])!r}"
    else:
        hint = "resume_from_checkpoint=True, which takes the newest"
    raise CheckpointError("this is no checkpoint of hfdist", where="resume_from_checkpoint", found=str(path), hint=hint)


def first_sound(names: Iterable[str]) -> Path | None:
    """Give the first of these checkpoints, alike on all ranks, that verifies; None: none does. A collective."""
    for name in names:
        try:
            verify_together(Path(name))
        except CheckpointError as error:
            if rank() == 0:
                logger.warning("%s is passed over: %s", name, error.what)
        else:
            return Path(name)
    return None
