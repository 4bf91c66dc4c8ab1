"""The folder of a run's checkpoints: how one gets its name, which one is the newest good one, and which are removed.

step-00000100.tmp-1a2b3c4d                 is being written, or being removed
step-00000100                              a checkpoint
step-00000100.hfdist-replaced-1a2b3c4d     gives its name to a newer one of the same step at this moment
step-00000100.bad-hash                     was found damaged, and moved aside
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hfdist.atomic_write import sync
from hfdist.checkpoint.manifest import (
    HASHES_STEM,
    NO_MANIFEST,
    DamagedError,
    FormatError,
    Manifest,
    Part,
    check_files,
    read_hashes,
    read_manifest,
)
from hfdist.checkpoint.random_state import RANDOM_STEM
from hfdist.checkpoint.regions import balance_by_bytes
from hfdist.checkpoint.save_plan import TRAINING_STATE
from hfdist.checkpoint.saved import check_readable, read_state
from hfdist.collectives import on_all_ranks, on_rank_zero, rank, world_size
from hfdist.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = r"(?:step-(?=\d{8})|checkpoint-)(?P<step>\d+)"
STEP_NAME = re.compile(_NAME)
"""Name of a checkpoint: ours, with eight digits or more, or that of the original Trainer."""
_UNFINISHED_NAME = re.compile(rf"{_NAME}\.tmp-[0-9a-f]{{8}}")
_REPLACED_NAME = re.compile(rf"(?P<final>{_NAME})\.hfdist-replaced-[0-9a-f]{{8}}")

HELD_OUT_LOSS = "held_out_loss"
"""Key of a checkpoint's state: the loss on the held-out set at its step; null where it was not evaluated."""

_SYNC_THREADS = 8

_Report = dict[str, str | None]
"""What is wrong with a checkpoint: a `DamagedError` as JSON, as all ranks must know of it."""


class _Checked(NamedTuple):
    """What a rank has found in its share of a checkpoint. It travels as a list of these values."""

    report: _Report | None
    """What is wrong; None: nothing."""
    hashed_bytes: int
    """Bytes in the share that have the right hash."""
    num_bytes: int
    """Bytes of all files of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay; one reason is enough."""

    newest: int
    """Number of the newest checkpoints that stay, at least 1."""
    every: int | None = None
    """Checkpoints of steps that this divides stay."""
    best: bool = False
    """Whether the checkpoint with the lowest held-out loss stays."""
    named: frozenset[str] = frozenset()
    """Checkpoints with these names stay; they count among the newest."""
    held: frozenset[str] = frozenset()
    """Checkpoints with these names stay, too, as something reads them; they count for nothing."""

    def choose(self, names: Sequence[str], best: str | None) -> set[str]:
        """Choose the checkpoints that stay.

        Args:
            names: names of the whole checkpoints, the oldest first.
            best: the one of these with the lowest held-out loss; None: none was evaluated.

        Returns:
            Names of those that stay, and of those that something reads.
        """
        kept = {name for name in names if name in self.named}
        others = [name for name in reversed(names) if name not in kept]
        num_others = max(self.newest - len(kept), 0)
        kept.update(others[:num_others])
        # The newest in any case, as the run goes on from it.
        kept.update(names[-1:])
        if self.best and best is not None:
            kept.add(best)
        if self.every is not None:
            kept |= {name for name in names if step_of(name) % self.every == 0}
        return kept | self.held


def step_name(step: int) -> str:
    """Give the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def original_name(step: int) -> str:
    """Give the name that the original Trainer has for the checkpoint after `step` optimizer steps.

    Code of users looks for checkpoints of this name.
    """
    return f"checkpoint-{step}"


def step_of(name: str) -> int:
    """Give the step in the name of a checkpoint, in either form; -1: it is the name of something else."""
    match = STEP_NAME.fullmatch(name)
    return -1 if match is None else int(match["step"])


def temporary(path: Path) -> Path:
    """Give a path beside `path` for a checkpoint that is not finished yet, or is about to be removed."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """Remove a folder, or the file or symbolic link that somebody has put in its place.

    If that fails there is a warning, and the next save tries again: its name is not that of a checkpoint.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints that killed saves have left; one that was to be replaced gets its name again."""
    _give_back_replaced(folder)
    for path in folder.iterdir():
        if _UNFINISHED_NAME.fullmatch(path.name):
            _remove(path)


def sync_tree(folder: Path, leave_out: Collection[str] = ()) -> None:
    """Wait until all files and folders in a folder are on the disk, except some files; files first, the folder last."""
    left_out = {folder / name for name in leave_out}
    paths = [folder, *(path for path in folder.rglob("*") if path not in left_out)]
    # Threads pay: a file system's journal takes many small files at once as fast as one.
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(sync, [path for path in paths if path.is_file()]))
    for path in sorted((path for path in paths if path.is_dir()), reverse=True):
        sync(path)


def commit(unfinished: Path, final: Path, *, is_whole: bool = True) -> None:
    """Give a finished checkpoint its name, in one step; an older one of the same step goes only afterwards.

    Args:
        unfinished: its folder until now.
        final: its path from now on.
        is_whole: False: a replica, of which other machines have some of the files.

    Raises:
        CheckpointError: a resume could not read the checkpoint, or files are missing.
    """
    try:
        manifest = check_readable(unfinished)
        if is_whole:
            check_files(unfinished, manifest, ())
    except DamagedError as error:
        raise CheckpointError(
            "what was written cannot be read again, so it does not become a checkpoint",
            where=error.where,
            found=f"{error.what}: {error.found}",
            hint="the checkpoints before it stay, and the same command goes on from the newest",
        ) from error
    # Their writers have synced the files of tensors, and two files of each rank: thousands. A replica has files, too,
    # that came from other machines.
    synced = _files_of_ranks(manifest) if is_whole else []
    sync_tree(unfinished, synced)
    replaced = None
    if os.path.lexists(final):
        replaced = final.with_name(f"{final.name}.hfdist-replaced-{secrets.token_hex(4)}")
        # Between this and the next rename neither has the name: if the process is killed just then, the next start
        # gives the older one its name again.
        final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    if replaced is not None:
        _remove(replaced)


def _files_of_ranks(manifest: Manifest) -> list[str]:
    """List the files that ranks write beside each other: those of tensors, random states and hashes."""
    listed = {part.file for part in manifest.parts}
    return [name for name in manifest.files if name not in listed or name.startswith((RANDOM_STEM, HASHES_STEM))]


def _give_back_replaced(folder: Path) -> None:
    """Give a checkpoint its name again if the save that was to replace it was killed just then."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _REPLACED_NAME.fullmatch(path.name)
        if match is None:
            continue
        final = folder / match["final"]
        if os.path.lexists(final):
            _remove(path)
        else:
            path.rename(final)


def find_newest(folder: Path) -> Path | None:
    """Give the newest checkpoint in `folder` that has the right hashes; None: there is no checkpoint. A collective.

    All ranks get the same answer. Damaged checkpoints that are newer are renamed to `step-N.bad-<reason>` with a
    warning, and never deleted.

    Raises:
        CheckpointError: all checkpoints are damaged, or a rank cannot read the folder. Nothing is renamed.
        FormatError: a newer checkpoint is of another format. Nothing is renamed.
    """

    def list_names() -> list[str]:
        _give_back_replaced(folder)
        return [path.name for path in list_checkpoints(folder)]

    names = on_rank_zero(list_names)
    damaged: dict[Path, _Report] = {}
    for name in reversed(names):
        path = folder / name
        report = _damage(path)
        if report is None:
            on_rank_zero(lambda: _move_aside(damaged))
            return path
        damaged[path] = report
    if damaged:
        raise CheckpointError(
            "none of the run's checkpoints can be used; nothing is changed",
            where=str(folder),
            found="; ".join(f"{path.name}: {report['what']}" for path, report in damaged.items()),
            hint="another run.name (in Python: output_dir) for a new run, or move them away, and it begins anew here",
        )
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """List the folders that have the name of a checkpoint, whole or damaged, the oldest first."""

    def is_ours(path: Path) -> bool:
        # The original Trainer may have written a checkpoint of its own form under the same name.
        is_named = step_of(path.name) >= 0 and path.is_dir()
        return is_named and (path.name.startswith("step-") or (path / TRAINING_STATE).is_dir())

    paths = filter(is_ours, folder.iterdir()) if folder.is_dir() else ()
    return sorted(paths, key=lambda path: step_of(path.name))


def verify_together(path: Path) -> None:
    """Check all bytes of a checkpoint of any name, each rank a share of them. A collective.

    Raises:
        CheckpointError: it is unfinished, damaged, or of another format, or not all ranks see it.
    """
    damage = _damage(path, is_named=False)
    if damage is not None:
        parts = {part: text for part, text in damage.items() if part not in ("reason", "message", "what")}
        raise CheckpointError(str(damage["what"]), **parts)


def _damage(path: Path, *, is_named: bool = True) -> _Report | None:
    """Say what is wrong with a checkpoint; None: nothing. Each rank checks a share of the bytes. A collective.

    `is_named`: the folder is named after its step.
    """
    checked = [_Checked(*values) for values in on_all_ranks(lambda: _check_share(path, is_named=is_named))]
    reports = [one.report for one in checked]
    lacking = [number for number, report in enumerate(reports) if report and report["reason"] == NO_MANIFEST]
    if 0 < len(lacking) < len(reports):
        raise CheckpointError(
            "some processes do not see the checkpoint that others see",
            where=str(path),
            found=f"no manifest on rank {', '.join(map(str, lacking))}",
            hint="all processes need the same folder, on a file system that all machines share",
        )
    for report in reports:
        if report is not None:
            return report
    num_unhashed = checked[0].num_bytes - sum(one.hashed_bytes for one in checked)
    if num_unhashed != 0:
        return _describe(DamagedError("parts", "not all bytes have a hash", where=path, found=num_unhashed))
    return None


def _check_share(path: Path, *, is_named: bool) -> _Checked:
    """Check the names and sizes of all files, and the hashes of this rank's share."""
    try:
        manifest = read_manifest(path)
        if is_named and manifest.step != step_of(path.name):
            raise DamagedError("step", "the manifest is of another step", where=path, found=manifest.step)
        # Before hashes are read: reading something that is no file might never end.
        check_files(path, manifest, ())
        parts = _list_share(path, manifest, rank(), world_size())
        check_files(path, manifest, parts)
    except DamagedError as error:
        return _Checked(_describe(error), 0, 0)
    return _Checked(None, sum(part.num_bytes for part in parts), manifest.num_bytes)


def _list_share(path: Path, manifest: Manifest, own: int, num_ranks: int) -> list[Part]:
    """Give the parts that a rank checks; it reads only the files of hashes that list them.

    3 files of hashes, 5 ranks:   ranks 0, 3 share what file 0 lists, ranks 1, 4 file 1, and rank 2 has file 2
    5 files of hashes, 3 ranks:   rank 0 has files 0, 3, rank 1 has files 1, 4, and rank 2 has file 2
    """
    parts = _share_of(manifest.parts, range(num_ranks), own)
    files = manifest.files_of_hashes
    for number, file in enumerate(files):
        readers: Sequence[int] = range(number, num_ranks, len(files))
        if number >= num_ranks:
            readers = [number % num_ranks]
        if own in readers:
            parts += _share_of(read_hashes(path, file), readers, own)
    return parts


def _share_of(parts: Sequence[Part], ranks: Sequence[int], own: int) -> list[Part]:
    """Give the parts of which rank `own` takes care, if some ranks share them by their bytes."""
    everybody = range(len(ranks))
    shares = balance_by_bytes([(part, part.num_bytes, everybody) for part in parts], len(ranks))
    return shares[ranks.index(own)]


def _describe(error: DamagedError) -> _Report:
    return {"reason": error.reason, "message": str(error), **error.texts()}


def _move_aside(damaged: dict[Path, _Report]) -> None:
    """Rename damaged checkpoints, so that none of them is taken for a whole one again."""
    for path, report in damaged.items():
        target = path.with_name(f"{path.name}.bad-{report['reason']}")
        if os.path.lexists(target):
            target = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
        try:
            path.rename(target)
        except OSError as error:
            logger.warning("the damaged checkpoint %s cannot be renamed: %s\n%s", path, error, report["message"])
        else:
            logger.warning("a damaged checkpoint was passed over and renamed to %s\n%s", target, report["message"])


def prune(folder: Path, keep: Keep) -> None:
    """Remove the whole checkpoints that nothing keeps. Any rank may call it; rank 0 acts.

    A damaged checkpoint stays, and does not count among the newest.
    """
    if rank() != 0:
        return
    try:
        whole = _list_whole(folder)
        by_loss = by_held_out_loss(folder) if keep.best else []
    except OSError as error:
        # The checkpoint that was just saved is whole, and the next save tries again.
        logger.warning("the checkpoints in %s cannot be listed, and none is removed: %s", folder, error)
        return
    best: str | None = None
    if by_loss:
        lowest, _ = by_loss[0]
        best = lowest.name
    kept = keep.choose([path.name for path in whole], best)
    for path in whole:
        if path.name not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint. A removal that is cut short leaves nothing that has the name of a checkpoint."""
    try:
        renamed = path.rename(temporary(path))
    except OSError as error:
        logger.warning("the old checkpoint %s cannot be removed: %s", path, error)
    else:
        _remove(renamed)


def by_held_out_loss(folder: Path) -> list[tuple[Path, float]]:
    """List the whole checkpoints that were evaluated, each with its held-out loss, the lowest loss first."""
    losses = []
    for path in _list_whole(folder):
        try:
            loss = read_state(path).get(HELD_OUT_LOSS)
        except (CheckpointError, OSError) as error:
            logger.warning("the held-out loss of %s cannot be read: %s", path, error)
            continue
        if isinstance(loss, int | float):
            losses.append((path, float(loss)))
    return sorted(losses, key=lambda item: item[1])


def _list_whole(folder: Path) -> list[Path]:
    """List the checkpoints whose files have the sizes in their manifest. To check hashes takes as long as a save."""
    return [path for path in list_checkpoints(folder) if _is_whole(path)]


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint is of a known format, and whole by the sizes of its files."""
    try:
        return find_damage(path) is None
    except FormatError:
        return False


def find_damage(path: Path) -> DamagedError | None:
    """Say what is wrong with a checkpoint by its manifest and the sizes of its files; None: nothing.

    Raises:
        FormatError: it is of another version of the format.
    """
    try:
        check_files(path, read_manifest(path), ())
    except DamagedError as error:
        return error
    return None


def move_damaged_aside(path: Path) -> None:
    """Rename a checkpoint if it is damaged by what `find_damage` says, with a warning; without one, do nothing."""
    if not os.path.lexists(path):
        return
    error = find_damage(path)
    if error is not None:
        _move_aside({path: _describe(error)})
