"""The folder of a run's checkpoints: names, commit by rename, finding the newest good one, removing old ones."""

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

_NAME = r"(?:step-(?=\d{8})|checkpoint-)(\d+)"
STEP_NAME = re.compile(_NAME)
_UNFINISHED_NAME = re.compile(rf"{_NAME}\.tmp-[0-9a-f]{{8}}")
_REPLACED_NAME = re.compile(rf"({_NAME})\.hfdist-replaced-[0-9a-f]{{8}}")

HELD_OUT_LOSS = "held_out_loss"
"""Key of a checkpoint's state: as evaluated at its step; null where it was not."""

_SYNC_THREADS = 8


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
        """Give the names that stay of the whole checkpoints, which are given with the oldest first; `best` is one."""
        kept = {name for name in names if name in self.named}
        # The newest fill what room is left beside them. The last stays in any case: the run goes on from it.
        newest_first = [name for name in reversed(names) if name not in kept]
        kept |= {*newest_first[: max(self.newest - len(kept), 0)], *names[-1:]}
        if self.best and best is not None:
            kept.add(best)
        if self.every is not None:
            kept |= {name for name in names if step_of(name) % self.every == 0}
        return kept | self.held


def step_name(step: int) -> str:
    """Name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def original_name(step: int) -> str:
    """Name of the checkpoint after `step` as the original Trainer has it, for which code of its users looks."""
    return f"checkpoint-{step}"


def step_of(name: str) -> int:
    """Give the step in the name of a checkpoint, in either form; -1: it is the name of something else."""
    match = STEP_NAME.fullmatch(name)
    return -1 if match is None else int(match[1])


def temporary(path: Path) -> Path:
    """Give a name beside `path` for what is not finished yet, or is about to be removed."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """Remove a folder, or what was put in its place; of a symbolic link the link alone.

    If that fails there is a warning, and the next save tries again: what is removed has no name of a checkpoint.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed saves have left, which is never complete, and give back what they replaced."""
    _give_back_replaced(folder)
    for path in folder.iterdir():
        if _UNFINISHED_NAME.fullmatch(path.name):
            _remove(path)


def sync_tree(folder: Path, leave_out: Collection[str] = ()) -> None:
    """`sync` for everything in a folder but some files, files first and the folder last."""
    left_out = {folder / name for name in leave_out}
    paths = [folder, *(path for path in folder.rglob("*") if path not in left_out)]
    # Threads pay: a file system's journal takes many small files at once as fast as one.
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(sync, [path for path in paths if path.is_file()]))
    for path in sorted((path for path in paths if path.is_dir()), reverse=True):
        sync(path)


def commit(unfinished: Path, final: Path, *, is_whole: bool = True) -> None:
    """Give a finished checkpoint its name, in one step; an older one of the same step goes only afterwards.

    Only one that was read back counts: it is a CheckpointError if a resume could not read it, or files are missing;
    of a replica that is not `is_whole`, other machines have some.
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
    # Not what ranks have written and synced, thousands of files: shared ones, and two of each rank. A replica has files
    # that came from other machines.
    listed = {part.file for part in manifest.parts}
    of_ranks = (RANDOM_STEM, HASHES_STEM)
    synced = [name for name in manifest.files if name not in listed or name.startswith(of_ranks)] if is_whole else []
    sync_tree(unfinished, synced)
    replaced = None
    if os.path.lexists(final):
        replaced = final.with_name(f"{final.name}.hfdist-replaced-{secrets.token_hex(4)}")
        # Between this and the next line neither has the name: see `_give_back_replaced`.
        final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    if replaced is not None:
        _remove(replaced)


def _give_back_replaced(folder: Path) -> None:
    """Give a checkpoint its name again that was to be replaced by a save that was killed just then."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _REPLACED_NAME.fullmatch(path.name):
            final = folder / match[1]
            if os.path.lexists(final):
                _remove(path)
            else:
                path.rename(final)


def find_newest(folder: Path) -> Path | None:
    """Give the newest checkpoint of `folder` that verifies, None if it holds none at all. A collective.

    All ranks get the same answer. Damaged ones that are newer are renamed to `step-N.bad-<reason>` with a warning,
    never deleted.

    Raises:
        CheckpointError: none can be used; or a rank cannot read the folder, and nothing says that what is in it is
            damaged. Nothing is renamed.
        FormatError: one that is newer is of another format. Nothing is renamed.
    """

    def list_names() -> list[str]:
        _give_back_replaced(folder)
        return [path.name for path in list_checkpoints(folder)]

    names = on_rank_zero(list_names)
    damaged: dict[Path, dict[str, str | None]] = {}
    for path in (folder / name for name in reversed(names)):
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
    """Give the folders with the name of a checkpoint, finished or not, oldest first."""

    def is_ours(path: Path) -> bool:
        # The original Trainer may have written one under the same name.
        is_named = step_of(path.name) >= 0 and path.is_dir()
        return is_named and (path.name.startswith("step-") or (path / TRAINING_STATE).is_dir())

    paths = filter(is_ours, folder.iterdir()) if folder.is_dir() else ()
    return sorted(paths, key=lambda path: step_of(path.name))


def verify_together(path: Path) -> None:
    """Check all bytes of a checkpoint of any name, shared among the ranks: for one alone it may take too long.

    A collective.

    Raises:
        CheckpointError: it is unfinished, damaged, or of another format, or not all ranks see it.
    """
    damage = _damage(path, is_named=False)
    if damage is not None:
        parts = {part: text for part, text in damage.items() if part not in ("reason", "message", "what")}
        raise CheckpointError(str(damage["what"]), **parts)


def _damage(path: Path, *, is_named: bool = True) -> dict[str, str | None] | None:
    """Verify one checkpoint, its files shared among the ranks, and say what is wrong with it. A collective."""
    checked = on_all_ranks(lambda: _check_share(path, is_named=is_named))
    reports = [report for report, *_ in checked]
    lacking = [number for number, report in enumerate(reports) if report and report["reason"] == NO_MANIFEST]
    if 0 < len(lacking) < len(reports):
        raise CheckpointError(
            "some processes do not see the checkpoint that others see",
            where=str(path),
            found=f"no manifest on rank {', '.join(map(str, lacking))}",
            hint="all processes need the same folder, on a file system that all machines share",
        )
    damage: dict[str, str | None] | None = next((report for report in reports if report is not None), None)
    (_, _, num_bytes), hashed = checked[0], sum(hashed for _, hashed, _ in checked)
    if damage is None and hashed != num_bytes:
        damage = _describe(DamagedError("parts", "not all bytes have a hash", where=path, found=num_bytes - hashed))
    return damage


def _check_share(path: Path, *, is_named: bool) -> tuple[dict[str, str | None] | None, int, int]:
    """Check this rank's share: what is wrong, the bytes that have the right hash, and the bytes of all files.

    `is_named`: the folder is named after its step.
    """
    try:
        manifest = read_manifest(path)
        if is_named and manifest.step != step_of(path.name):
            raise DamagedError("step", "the manifest is of another step", where=path, found=manifest.step)
        # Before hashes are read: of what is no file, reading might never end.
        check_files(path, manifest, ())
        parts = _list_share(path, manifest, rank(), world_size())
        check_files(path, manifest, parts)
    except DamagedError as error:
        return _describe(error), 0, 0
    return None, sum(part.num_bytes for part in parts), manifest.num_bytes


def _list_share(path: Path, manifest: Manifest, own: int, num_ranks: int) -> list[Part]:
    """Give the parts that a rank verifies. Of the files of hashes it reads only those that it needs."""
    shares = balance_by_bytes([(part, part.num_bytes, range(num_ranks)) for part in manifest.parts], num_ranks)
    parts = shares[own]
    files = manifest.files_of_hashes
    for number, file in enumerate(files):
        # Several ranks, where fewer have written; or else one.
        readers = range(number, num_ranks, len(files)) or range(number % num_ranks, number % num_ranks + 1)
        if own in readers:
            items = [(part, part.num_bytes, range(len(readers))) for part in read_hashes(path, file)]
            parts += balance_by_bytes(items, len(readers))[readers.index(own)]
    return parts


def _describe(error: DamagedError) -> dict[str, str | None]:
    return {"reason": error.reason, "message": str(error), **error.texts()}


def _move_aside(damaged: dict[Path, dict[str, str | None]]) -> None:
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
    """Remove the complete checkpoints that nothing keeps. Any rank may call it; rank 0 acts.

    One that is not whole takes nobody's place: it stays beside as many others as if it were not there.
    """
    if rank() != 0:
        return
    try:
        whole = _list_whole(folder)
        best = [path.name for path, _ in by_held_out_loss(folder)[:1]] if keep.best else []
    except OSError as error:
        # The checkpoint that was just saved is whole, and the next save tries again.
        logger.warning("the checkpoints in %s cannot be listed, and none is removed: %s", folder, error)
        return
    kept = keep.choose([path.name for path in whole], next(iter(best), None))
    for path in whole:
        if path.name not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint; a removal that is cut short leaves nothing that looks like one."""
    try:
        going = path.rename(temporary(path))
    except OSError as error:
        logger.warning("the old checkpoint %s cannot be removed: %s", path, error)
    else:
        _remove(going)


def by_held_out_loss(folder: Path) -> list[tuple[Path, float]]:
    """Give the whole checkpoints that were evaluated, each with its held-out loss, the lowest first."""
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
    """Give the checkpoints whose manifest can be read and whose files have its sizes: hashes take as long as a save."""
    return [path for path in list_checkpoints(folder) if _is_whole(path)]


def _is_whole(path: Path) -> bool:
    try:
        return find_damage(path) is None
    except FormatError:
        return False


def find_damage(path: Path) -> DamagedError | None:
    """Give what is wrong with a checkpoint by its manifest and the sizes of its files; None: nothing.

    Raises:
        FormatError: it is of another version of the format.
    """
    try:
        check_files(path, read_manifest(path), ())
    except DamagedError as error:
        return error
    return None


def move_damaged_aside(path: Path) -> None:
    """Rename what has a checkpoint's name and is damaged, as `find_damage` sees it; a warning says so."""
    if os.path.lexists(path) and (error := find_damage(path)) is not None:
        _move_aside({path: _describe(error)})
