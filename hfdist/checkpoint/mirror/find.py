"""Finds what a run goes on from in its mirror, and brings it to this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hfdist.checkpoint.folder import list_checkpoints, step_of
from hfdist.checkpoint.manifest import FormatError
from hfdist.checkpoint.mirror.mirror import Mirror
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)


def fetch_newer(mirror: Mirror, names: Sequence[str], folder: Path) -> Path | None:
    """Bring the newest checkpoint of a mirror that is whole, if it is newer than those of the run's folder.

    Args:
        mirror: that of the run.
        names: its checkpoints, the oldest first.
        folder: that of the run's checkpoints on this machine.

    Returns:
        Its path in `folder`; None: there is no newer one that is whole.

    Raises:
        CheckpointError: none that is there can be used, and the folder has none.
        ResourceError: the mirror cannot be read, or the disk has no room.
    """
    own = list_checkpoints(folder)
    newest = step_of(own[-1].name) if own else -1
    damaged: list[str] = []
    for name in (name for name in reversed(names) if step_of(name) > newest):
        logger.info("%s comes from %s", name, mirror.shown)
        try:
            return mirror.fetch(name, folder)
        except FormatError:
            raise
        except CheckpointError as error:
            logger.warning("%s of the mirror is passed over: %s", name, error)
            damaged.append(f"{name}: {error.what}")
    if damaged and not own:
        raise CheckpointError(
            "none of the mirror's checkpoints can be used; nothing is changed",
            where=mirror.shown,
            found="; ".join(damaged),
            hint="another run.name, or checkpoint.mirror=null, for a new run",
        )
    return None
