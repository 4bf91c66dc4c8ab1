"""Finds what a run goes on from in its mirror, and brings it to this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hfdist.checkpoint.folder import by_held_out_loss, find_damage, list_checkpoints, step_of
from hfdist.checkpoint.manifest import FormatError
from hfdist.checkpoint.mirror.mirror import Mirror
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)


def fetch_newer(mirror: Mirror, names: Sequence[str], folder: Path) -> Path | None:
    """Bring the newest checkpoint of a mirror that is whole, if it is newer than those of the run's folder.

    A damaged one of the folder does not count; where it has the name of what comes, it is renamed.

    Args:
        mirror: that of the run.
        names: its checkpoints, the oldest first.
        folder: that of the run's checkpoints on this machine.

    Returns:
        Its path in `folder`; None: there is no newer one that is whole.

    Raises:
        CheckpointError: none that is there can be used, and the folder has none either.
        ResourceError: the mirror cannot be read, or the disk has no room.
    """
    newest = next((step_of(path.name) for path in reversed(list_checkpoints(folder)) if _may_be_used(path)), -1)
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
    if damaged and newest < 0:
        raise CheckpointError(
            "none of the mirror's checkpoints can be used; nothing is changed",
            where=mirror.shown,
            found="; ".join(damaged),
            hint="another run.name, or checkpoint.mirror=null, for a new run",
        )
    return None


def fetch_best(mirror: Mirror, names: Sequence[str], folder: Path) -> Path | None:
    """Bring the checkpoint of a mirror with the lowest held-out loss, if those of the folder have a higher one.

    It is older than the newest of the folder: the run does not go on from it. Arguments, as the ResourceError, are
    those of `fetch_newer`.

    Returns:
        Its path in `folder`; None: the folder has the best one, or that of the mirror is damaged.
    """
    newest = max((step_of(path.name) for path in list_checkpoints(folder)), default=-1)
    best = mirror.best([name for name in names if step_of(name) < newest])
    own = by_held_out_loss(folder)
    if best is None or (own and own[0][1] <= best[1]):
        return None
    name, loss = best
    logger.info("%s comes from %s, too: it has the lowest held-out loss, %.4f", name, mirror.shown, loss)
    try:
        return mirror.fetch(name, folder)
    except CheckpointError as error:
        logger.warning("%s of the mirror is passed over: %s", name, error)
        return None


def _may_be_used(path: Path) -> bool:
    try:
        return find_damage(path) is None
    except (FormatError, OSError):
        # This is no damage: the start that reads it says what it is.
        return True
