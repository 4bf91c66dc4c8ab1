"""Chooses the checkpoint of a mirror that a run goes on from, and brings it to this machine."""

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
    """Bring the newest whole checkpoint of a mirror, if it is newer than those in the run's folder.

    A damaged checkpoint in the folder does not count; if it has the same name, it is renamed.

    Args:
        mirror: the mirror of the run.
        names: names of the mirror's checkpoints, the oldest first.
        folder: the folder of the run's checkpoints on this machine.

    Returns:
        The path of the checkpoint in `folder`; None: the mirror has no newer one that is whole.

    Raises:
        CheckpointError: the mirror's checkpoints are damaged, and the folder has none that can be used.
        FormatError: a newer checkpoint is of another format.
        ResourceError: the mirror cannot be read, or the disk has no room.
    """
    newest = _newest_usable_step(folder)
    damaged: list[str] = []
    for name in reversed(names):
        if step_of(name) <= newest:
            break
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
    """Bring the checkpoint of a mirror with the lowest held-out loss, if none in the run's folder has a lower one.

    Only checkpoints that are older than the newest in the folder are looked at: the run does not go on from this one.

    Args:
        mirror: the mirror of the run.
        names: names of the mirror's checkpoints.
        folder: the folder of the run's checkpoints on this machine.

    Returns:
        The path of the checkpoint in `folder`; None: the folder has the best one, or that of the mirror is damaged.

    Raises:
        ResourceError: the mirror cannot be read, or the disk has no room.
    """
    newest = max((step_of(path.name) for path in list_checkpoints(folder)), default=-1)
    best = mirror.best([name for name in names if step_of(name) < newest])
    if best is None:
        return None
    name, loss = best
    own_losses = [own_loss for _, own_loss in by_held_out_loss(folder)]
    if own_losses and min(own_losses) <= loss:
        return None
    logger.info("%s comes from %s, too: it has the lowest held-out loss, %.4f", name, mirror.shown, loss)
    try:
        return mirror.fetch(name, folder)
    except CheckpointError as error:
        logger.warning("%s of the mirror is passed over: %s", name, error)
        return None


def _newest_usable_step(folder: Path) -> int:
    """Give the step of the newest checkpoint in a folder that is not damaged; -1: there is none."""
    for path in reversed(list_checkpoints(folder)):
        if _may_be_used(path):
            return step_of(path.name)
    return -1


def _may_be_used(path: Path) -> bool:
    """Whether a checkpoint is not damaged, as far as the sizes of its files show."""
    try:
        return find_damage(path) is None
    except (FormatError, OSError):
        # These are no damage: the start that reads the checkpoint says what is wrong.
        return True
