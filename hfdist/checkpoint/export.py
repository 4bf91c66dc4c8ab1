"""A model as a Hub folder: written beside the one that is there, and put into its place when it is whole."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from hfdist.atomic_write import sync
from hfdist.checkpoint.folder import sync_tree
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.save_plan import INDEX_FILE, MODEL_STEM, Planner
from hfdist.checkpoint.write import Contents, list_files, removed_on_failure, write_folder
from hfdist.models.names.hub_names import HubNames

_UNFINISHED_EXPORT = re.compile(r"\.hfdist-export-[0-9a-f]{8}")
_MODEL_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def export_model(
    folder: Path,
    pieces: Iterable[Piece],
    write_model_files: Callable[[Path], None],
    *,
    stem: str = MODEL_STEM,
    names: HubNames | None = None,
) -> None:
    """Write the weights alone as a Hub folder, and replace an older model in it; other files stay. A collective.

    Of the pieces, optimizer state is left out. `write_model_files` is called on rank 0; `stem` and `names` are
    those of `Planner`.

    Raises:
        CheckpointError, ResourceError: as for `write_folder`.
    """
    plan, elements, _ = Planner(weights_only=True, stem=stem, names=names).plan(pieces)
    contents = Contents(plan=plan, elements=elements, write_files=write_model_files)
    write_folder(contents, folder, lambda: _unfinished_export(folder), lambda made, _: _move_into(made, folder))


def replace_model(folder: Path, write_files: Callable[[Path], object]) -> None:
    """Let `write_files` write a Hub model and put it into `folder`, complete or not at all, from this process alone."""
    unfinished = _unfinished_export(folder)
    with removed_on_failure(unfinished):
        unfinished.mkdir()
        write_files(unfinished)
        _move_into(unfinished, folder)


def _unfinished_export(folder: Path) -> Path:
    """Make `folder`, and a name in it for what is not complete yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        # The folder may be the user's own, with other hidden folders in it.
        if _UNFINISHED_EXPORT.fullmatch(path.name):
            # An export that was killed has left it.
            shutil.rmtree(path, ignore_errors=True)
    return folder / f".hfdist-export-{secrets.token_hex(4)}"


def _move_into(unfinished: Path, folder: Path) -> None:
    sync_tree(unfinished)
    names = sorted(list_files(unfinished), key=lambda name: (name == INDEX_FILE, name))
    has_shards = INDEX_FILE in names
    # An adapter replaces no model: the folder may be that of its base.
    has_model = any(_MODEL_FILES.fullmatch(name) for name in names)
    for old in folder.iterdir() if has_model else ():
        # Loading prefers a single file to an index: an older form of the model must not stay beside the new. Of shards
        # that are replaced in part, no model can be loaded, rather than one of two: the index comes last.
        if _MODEL_FILES.fullmatch(old.name) and (has_shards or old.name not in names):
            old.unlink()
    sync(folder)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(folder / name)
    shutil.rmtree(unfinished)
    # A file's new place lasts when its folder is synced; the folder's own, when that above it is.
    for place in {parent for name in names for parent in PurePosixPath(name).parents}:
        sync(folder / place)
