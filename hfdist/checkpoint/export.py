"""Writes a model as a Hub folder: files are made in a hidden folder, and put into their places when all are whole."""

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
    """Write the weights of a model as a Hub folder, and replace an older model in it; other files stay. A collective.

    Args:
        folder: the Hub folder, on a file system that all ranks share; it is made if there is none.
        pieces: the pieces of this rank; state of the optimizer is left out.
        write_model_files: writes all other files of the model, such as its config, into a folder; called on rank 0.
        stem: name of the files of weights, without the number of a shard and the ending.
        names: names of the tensors in these files, where they differ from those of the model.

    Raises:
        CheckpointError: files cannot be written; on all ranks alike.
        ResourceError: the disk is full; on all ranks alike.
    """
    plan, elements, _ = Planner(weights_only=True, stem=stem, names=names).plan(pieces)
    contents = Contents(plan=plan, elements=elements, write_files=write_model_files)
    write_folder(contents, folder, lambda: _unfinished_export(folder), lambda made, _: _move_into(made, folder))


def replace_model(folder: Path, write_files: Callable[[Path], object]) -> None:
    """Replace the model in a Hub folder, complete or not at all, from this process alone.

    Args:
        folder: the Hub folder; it is made if there is none.
        write_files: writes all files of the model into the empty folder that it gets.
    """
    unfinished = _unfinished_export(folder)
    with removed_on_failure(unfinished):
        unfinished.mkdir()
        write_files(unfinished)
        _move_into(unfinished, folder)


def _unfinished_export(folder: Path) -> Path:
    """Make `folder`, and choose a name in it for a hidden folder; remove those that killed exports have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        # The whole name counts: the folder may be the user's own, with other hidden folders in it.
        if _UNFINISHED_EXPORT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return folder / f".hfdist-export-{secrets.token_hex(4)}"


def _move_into(unfinished: Path, folder: Path) -> None:
    """Move the files of a whole model into a Hub folder, in the place of an older model's."""
    sync_tree(unfinished)
    # The index comes last: see below.
    names = sorted(list_files(unfinished), key=lambda name: (name == INDEX_FILE, name))
    has_shards = INDEX_FILE in names
    # An adapter replaces no model: the folder may be that of its base.
    has_model = any(_MODEL_FILES.fullmatch(name) for name in names)
    if has_model:
        for old in folder.iterdir():
            # Loading prefers a single file to an index: an older form of the model must not stay beside the new one. If
            # shards are replaced in part only, no model can be loaded, and not a mixture of two: the index is missing.
            if _MODEL_FILES.fullmatch(old.name) and (has_shards or old.name not in names):
                old.unlink()
    sync(folder)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(folder / name)
    shutil.rmtree(unfinished)
    # The new name of a file is on the disk when its folder is synced; that of a folder, when the folder above it is.
    parents = {parent for name in names for parent in PurePosixPath(name).parents}
    for parent in parents:
        sync(folder / parent)
