"""Saving: nothing is gathered. Every rank writes the elements that it holds into files that rank 0 has laid out."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfdist.checkpoint import folder as folders
from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.manifest import FORMAT, MANIFEST, Manifest, Part, hash_file, list_files
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.random_state import RandomState, random_file
from hfdist.checkpoint.save_plan import MODEL_STEM, TRAINING_STATE, Plan, Planner, WriteItem
from hfdist.checkpoint.shard_writer import write_shard
from hfdist.collectives import FULL_DISK, on_all_ranks, on_rank_zero, rank, world_size
from hfdist.errors import CheckpointError, ResourceError

STATE_FILE = f"{TRAINING_STATE}/state.json"
INDEX_FILE = "model.safetensors.index.json"
_UNFINISHED_EXPORT = re.compile(r"\.hfdist-export-[0-9a-f]{8}")
MODEL_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True, kw_only=True)
class PreparedSave:
    """All that a save needs of this rank."""

    final: Path
    step: int
    plan: Plan
    slots: list[WriteItem]
    elements: list[torch.Tensor]
    """For each slot; live, or copies."""
    state: str | CheckpointError
    """Content of `STATE_FILE` on rank 0, or why there is none: to be raised where all ranks hear of it."""
    random_state: RandomState
    write_model_files: Callable[[Path], object]


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    write_model_files: Callable[[Path], object],
) -> Path:
    """Write `<folder>/step-N`, complete or not at all. A collective.

    Args:
        folder: the run's folder of checkpoints, on a file system that all ranks share; made if missing.
        step: optimizer steps done.
        pieces: what this rank holds.
        state: JSON values that `read_checkpoint` gives back; rank 0's is written.
        write_model_files: writes config, tokenizer and the like into the given folder; called on rank 0.

    Raises:
        CheckpointError: elements that no rank holds, or files that cannot be written; on all ranks alike.
        NumericsError: a trained parameter or its state is not finite; on all ranks alike.
        ResourceError: the disk is full; on all ranks alike.
    """
    return complete(prepare(Planner(), folder / folders.step_name(step), step, pieces, state, write_model_files))


def prepare(
    planner: Planner,
    final: Path,
    step: int,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    write_model_files: Callable[[Path], object],
) -> PreparedSave:
    """Agree on what is written where, and write nothing yet. A collective.

    Args:
        planner: of this training.
        final: the checkpoint, with one of the names that `STEP_NAME` matches.
        step: as of `write_checkpoint`, and so are the others.
        pieces: likewise.
        state: likewise.
        write_model_files: likewise.
    """
    plan, slots, elements = planner.plan(pieces)
    content = {"format": FORMAT, "step": step, "world_size": world_size(), **plan.numbers_as_json(), "state": state}
    return PreparedSave(
        final=final,
        step=step,
        plan=plan,
        slots=slots,
        elements=elements,
        state=_to_json(content) if rank() == 0 else "",
        random_state=RandomState(),
        write_model_files=write_model_files,
    )


def complete(save: PreparedSave, group: dist.ProcessGroup | None = None) -> Path:
    """Write what was prepared, and give it its name once all of it is on the disk. A collective over `group`.

    Raises:
        CheckpointError, NumericsError, ResourceError: as for `write_checkpoint`.
    """
    folder = save.final.parent

    def begin() -> str:
        if isinstance(save.state, CheckpointError):
            raise save.state
        folder.mkdir(parents=True, exist_ok=True)
        folders.remove_unfinished(folder)
        unfinished = folders.temporary(save.final)
        with _removed_on_failure(unfinished):
            _lay_out(unfinished, save.plan, save.write_model_files)
            (unfinished / STATE_FILE).parent.mkdir(exist_ok=True)
            (unfinished / STATE_FILE).write_text(json.dumps(json.loads(save.state), indent=1), encoding="utf-8")
        return unfinished.name

    def write_own() -> list[list[Any]]:
        parts = _write_share(unfinished, save.plan, save.slots, save.elements)
        name, random_state = random_file(rank()), save.random_state.to_bytes()
        (unfinished / name).write_bytes(random_state)
        return [part.to_json() for part in [*parts, Part.first(name, random_state)]]

    unfinished = folder / on_rank_zero(begin, group)
    with _removed_on_failure(unfinished):
        written = on_all_ranks(write_own, group)
        parts = [Part.from_json(values) for of_rank in written for values in of_rank]
        on_rank_zero(lambda: _finish(save, unfinished, parts), group)
    return save.final


def export_model(
    folder: Path, pieces: Iterable[Piece], write_model_files: Callable[[Path], None], *, stem: str = MODEL_STEM
) -> None:
    """Write the weights alone as a Hub folder; other files of `folder` stay. A collective.

    Args:
        folder: made if missing; an older model in it is replaced.
        pieces: what this rank holds; optimizer state in it is left out.
        write_model_files: writes config, tokenizer and the like into the given folder; called on rank 0.
        stem: of the files of weights, as of `Planner`.

    Raises:
        CheckpointError, ResourceError: as for `write_checkpoint`.
    """
    plan, slots, elements = Planner(weights_only=True, stem=stem).plan(pieces)

    def begin() -> str:
        unfinished = _unfinished_export(folder)
        with _removed_on_failure(unfinished):
            _lay_out(unfinished, plan, write_model_files)
        return unfinished.name

    def write_own() -> None:
        _write_share(unfinished, plan, slots, elements)

    unfinished = folder / on_rank_zero(begin)
    with _removed_on_failure(unfinished):
        on_all_ranks(write_own)
        on_rank_zero(lambda: _move_into(unfinished, folder))


def replace_model(folder: Path, write_files: Callable[[Path], object]) -> None:
    """Let `write_files` write a Hub model and put it into `folder`, complete or not at all, from this process alone."""
    unfinished = _unfinished_export(folder)
    with _removed_on_failure(unfinished):
        unfinished.mkdir()
        write_files(unfinished)
        _move_into(unfinished, folder)


def _unfinished_export(folder: Path) -> Path:
    """Make `folder`, and a name in it for what is not complete yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        # The folder may be the user's own, with other hidden folders in it.
        if _UNFINISHED_EXPORT.fullmatch(path.name):
            # By an export that was killed.
            shutil.rmtree(path, ignore_errors=True)
    return folder / f".hfdist-export-{secrets.token_hex(4)}"


def _lay_out(folder: Path, plan: Plan, write_model_files: Callable[[Path], object]) -> None:
    if plan.num_bytes > shutil.disk_usage(folder.parent).free:
        raise _no_room(folder.parent, plan)
    folder.mkdir()
    with _room_for(plan, folder):
        write_model_files(folder)
        for name, file_plan in plan.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            safetensors_io.create(folder / name, file_plan)
        if plan.index is not None:
            (folder / INDEX_FILE).write_text(json.dumps(plan.index, indent=2), encoding="utf-8")


def _write_share(folder: Path, plan: Plan, slots: list[WriteItem], elements: list[torch.Tensor]) -> list[Part]:
    with _room_for(plan, folder):
        return write_shard(folder, slots, elements)


@contextlib.contextmanager
def _room_for(plan: Plan, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise _no_room(folder.parent, plan) from error
        raise


def _no_room(folder: Path, plan: Plan) -> ResourceError:
    free_bytes = shutil.disk_usage(folder).free
    return ResourceError(
        "the disk has no room for the checkpoint",
        where=str(folder),
        found=f"{plan.num_bytes:,} bytes needed, {free_bytes:,} bytes free",
        hint="free space, or a smaller checkpoint.keep; the same command goes on from the last checkpoint",
    )


def _finish(save: PreparedSave, unfinished: Path, parts: list[Part]) -> None:
    headers = [Part.first(name, file_plan.header) for name, file_plan in save.plan.files.items()]
    hashed = {part.file for part in (*parts, *headers)}
    small = [hash_file(unfinished, name) for name in list_files(unfinished) if name not in hashed]
    manifest = Manifest.of_parts(save.step, [*parts, *headers, *small])
    (unfinished / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1), encoding="utf-8")
    folders.commit(unfinished, save.final)


def _move_into(unfinished: Path, folder: Path) -> None:
    folders.sync_tree(unfinished)
    names = list_files(unfinished)
    for old in folder.iterdir():
        # Loading prefers a single file to an index: an older form of the model must not stay beside the new.
        if MODEL_FILES.fullmatch(old.name) and old.name not in names:
            old.unlink()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(folder / name)
    shutil.rmtree(unfinished)
    folders.sync(folder)


def _to_json(content: dict[str, Any]) -> str | CheckpointError:
    """Without line breaks: json makes those ten times as slowly, and training waits for this."""
    try:
        return json.dumps(content)
    except (TypeError, ValueError) as error:
        return CheckpointError("the state to save holds a value that JSON cannot", found=error)


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        if rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise
