"""Where a run begins: at step 0, from a checkpoint on the disk, or from a replica in memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfdist.checkpoint import Replicas, find_newest, read_state, verify_together
from hfdist.checkpoint.folder import list_checkpoints, step_of
from hfdist.checkpoint.manifest import MANIFEST, DamagedError
from hfdist.checkpoint.replicas import NAMES_FILE
from hfdist.collectives import on_rank_zero
from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.diff import Change, check_changes, find_changes
from hfdist.config.islands import IslandMethod
from hfdist.config.run import RunConfig
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The place where a run begins, and what differs from the run that wrote the checkpoint there."""

    checkpoint: str | None
    """Path of the checkpoint; None: the run begins at step 0."""
    goes_on: bool
    """Whether the checkpoint is one of this run, whose files of metrics then go on."""
    in_memory: bool
    """Whether the checkpoint is a replica in memory."""
    changes: list[str]
    """Changes of the config since the checkpoint, a line of text each."""
    passed_over: list[str]
    """Replicas that could not be used, and why, a line of text each."""


def open_replicas(config: RunConfig) -> Replicas | None:
    """Find the replicas of the run in memory; None: the config asks for none."""
    checkpoints = config.run.folder.checkpoints
    if config.checkpoint.replicate_every is None:
        # Replicas of an earlier start must not come back at a later one: the run goes on without them.
        on_rank_zero(lambda: (checkpoints / NAMES_FILE).unlink(missing_ok=True))
        return None
    return Replicas(Path(config.checkpoint.replicate_dir), checkpoints)


def find_start(config: RunConfig, replicas: Replicas | None) -> Start:
    """Find where the run begins: from the newest replica in memory, if no checkpoint is newer, or from the disk.

    Raises:
        CheckpointError: the named checkpoint is damaged, or the config has a change that is not allowed.
    """
    resume, checkpoints = config.checkpoint.resume, config.run.folder.checkpoints
    # A run that began from a path continues from its own checkpoints: launchers and schedulers repeat the command.
    goes_on_here = resume != "never" and (resume == "auto" or not lies_in(Path(resume), checkpoints))
    found = _find_newest(replicas, checkpoints) if goes_on_here else None
    if found is not None and resume != "auto":
        logger.warning("the run folder holds %s already: going on from it, and not from %s", found.name, resume)
    is_own = found is not None
    if found is None and resume not in ("auto", "never"):
        found = Path(resume)
        is_own = lies_in(found, checkpoints)
        verify_together(Path(resume))

    def compare() -> list[str]:
        # `check_resume` has compared the newest one, and the one that verifies may be older.
        return [] if found is None else [str(change) for change in _changes_since(found, config)]

    changes = on_rank_zero(compare)
    in_memory = replicas is not None and found is not None and replicas.holds(found)
    if replicas is not None:
        found = replicas.begin_line(found)
    if found is not None:
        logger.info("resuming from %s%s", found, "".join(f"\n  changed: {change}" for change in changes))
    return Start(
        checkpoint=None if found is None else str(found),
        goes_on=is_own,
        in_memory=in_memory,
        changes=changes,
        passed_over=[] if replicas is None else replicas.passed_over,
    )


def _find_newest(replicas: Replicas | None, checkpoints: Path) -> Path | None:
    """Give the newest replica or checkpoint that verifies."""
    if replicas is None:
        return find_newest(checkpoints)
    # The checkpoints are not verified yet: that takes the time which a replica saves.
    newest = on_rank_zero(lambda: max((step_of(path.name) for path in list_checkpoints(checkpoints)), default=0))
    replica = replicas.find(at_least=newest)
    if replica is not None:
        return replica
    on_disk = find_newest(checkpoints)
    sound_step = 0 if on_disk is None else step_of(on_disk.name)
    if sound_step < newest:
        # The newest on the disk is damaged, and a replica may be newer than the one that verifies.
        replica = replicas.find(at_least=sound_step + 1)
    return on_disk if replica is None else replica


def lies_in(checkpoint: Path, folder: Path) -> bool:
    """Whether a checkpoint lies in a folder: its path, or what the path links to."""
    return folder.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)


def _changes_since(checkpoint: Path, config: RunConfig) -> list[Change]:
    """List the changes of the config since a checkpoint; none for one from Python, which has no config.

    CheckpointError: a change is not allowed.
    """
    before = read_state(checkpoint).get("config")
    changes = [] if before is None else find_changes(before, to_values(config))
    check_changes(changes, allowed=config.checkpoint.allow_changes, where=str(checkpoint))
    if before is not None:
        _check_share(before.get("islands") or {}, config, checkpoint)
    return changes


def _check_share(before: Mapping[str, Any], config: RunConfig, checkpoint: Path) -> None:
    """Refuse a checkpoint that knows the places in the data of another island alone.

    `before` is the section `islands` of the checkpoint's config.
    """
    count, index, islands = before.get("count", 1), before.get("index", 0), config.islands
    has_share = count > 1 and before.get("method") == IslandMethod.parameter_server.name
    is_alike = islands.method is IslandMethod.parameter_server and (islands.shares, islands.index) == (count, index)
    if has_share and not is_alike:
        raise CheckpointError(
            "the checkpoint of an island of a parameter server knows its own share of the data only",
            where=str(checkpoint),
            found=f"island {index} of {count}",
            allowed=f"islands=parameter_server islands.count={count} islands.index={index}",
            hint=f"a new run that begins with its weights: model=hub model.name={checkpoint}",
        )


def check_resume(config: RunConfig) -> None:
    """Refuse, before anything is built, a `checkpoint.resume` that does not fit the folder's checkpoints."""
    resume, checkpoints = config.checkpoint.resume, config.run.folder.checkpoints
    present = sorted(path.name for path in checkpoints.glob("step-*") if path.suffix == "")
    if resume == "never" and present:
        what = "the run folder already holds checkpoints"
        hint = "another run.name, or checkpoint.resume=auto to go on from it"
        raise CheckpointError(what, where="checkpoint.resume=never", found=f"{present[-1]} in {checkpoints}", hint=hint)
    path = Path(resume)
    is_of_this_run = lies_in(path, checkpoints)
    if is_of_this_run and present and present[-1] > path.resolve().name:
        what = "the run folder holds later checkpoints, and two branches cannot share a folder"
        found = f"{path.name}, with {present[-1]} beside it"
        hint = "another run.name, or move the later ones out of the folder"
        raise CheckpointError(what, where="checkpoint.resume", found=found, hint=hint)
    start = checkpoints / present[-1] if present and not is_of_this_run else path
    if (start / MANIFEST).is_file():
        # A damaged checkpoint is found and skipped later, when all are verified.
        with contextlib.suppress(DamagedError):
            _changes_since(start, config)
