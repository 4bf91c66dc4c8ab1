"""Which checkpoints of a run stay, and removing the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from hfdist.checkpoint.folder import list_checkpoints, remove, step_of, temporary
from hfdist.checkpoint.manifest import MANIFEST
from hfdist.checkpoint.read import read_state
from hfdist.collectives import rank
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)

HELD_OUT_LOSS = "held_out_loss"
"""Key of a checkpoint's state: as evaluated at its step; null where it was not."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay; one reason is enough."""

    newest: int
    """So many, at least 1."""
    every: int | None = None
    """Those of steps that this divides."""
    best: bool = False
    """The one with the lowest held-out loss."""
    named: frozenset[str] = frozenset()
    """Those with these names, which count among the newest."""


def prune(folder: Path, keep: Keep) -> None:
    """Remove the complete checkpoints that nothing keeps. Any rank may call it; rank 0 acts."""
    if rank() != 0:
        return
    try:
        complete = [path for path in list_checkpoints(folder) if (path / MANIFEST).is_file()]
    except OSError as error:
        # The checkpoint that was just saved is whole, and the next save tries again.
        logger.warning("the checkpoints in %s cannot be listed, and none is removed: %s", folder, error)
        return
    kept = {path for path in complete if path.name in keep.named}
    # As many as there is room for beside them, and the newest in any case: the run goes on from it.
    newest_first = [path for path in reversed(complete) if path not in kept]
    kept |= set(newest_first[: max(keep.newest - len(kept), 0)]) | set(complete[-1:])
    if keep.every is not None:
        kept |= {path for path in complete if step_of(path.name) % keep.every == 0}
    if keep.best:
        kept |= {path for path, _ in _by_held_out_loss(complete)[:1]}
    for path in complete:
        if path in kept:
            continue
        try:
            # Renamed first: a removal that is cut short leaves nothing that looks like a checkpoint.
            going = path.rename(temporary(path))
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be removed: %s", path, error)
        else:
            remove(going)


def by_held_out_loss(folder: Path) -> list[tuple[Path, float]]:
    """Give the complete checkpoints that were evaluated, each with its held-out loss, the lowest first."""
    return _by_held_out_loss([path for path in list_checkpoints(folder) if (path / MANIFEST).is_file()])


def _by_held_out_loss(complete: list[Path]) -> list[tuple[Path, float]]:
    losses = {path: loss for path in complete if (loss := _held_out_loss(path)) is not None}
    return sorted(losses.items(), key=lambda item: item[1])


def _held_out_loss(path: Path) -> float | None:
    """As evaluated at the step of a checkpoint, if it was."""
    try:
        loss = read_state(path).get(HELD_OUT_LOSS)
    except (CheckpointError, OSError) as error:
        logger.warning("the held-out loss of %s cannot be read: %s", path, error)
        return None
    return float(loss) if isinstance(loss, (int, float)) else None
