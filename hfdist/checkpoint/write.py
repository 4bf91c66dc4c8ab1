"""Saving: nothing is gathered. Every rank writes the elements that it holds into files that rank 0 has laid out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfdist.checkpoint import folder as folders
from hfdist.checkpoint import tensorfile
from hfdist.checkpoint.exchange import on_all_ranks, on_rank_zero, rank, world_size
from hfdist.checkpoint.layout import Assignment, Region, TensorId, TensorSpec, assign_writers, pack_files, share_out
from hfdist.checkpoint.manifest import FORMAT, MANIFEST, FileRecord, Manifest, hash_file, list_files
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.checkpoint.random_state import save_random_state
from hfdist.checkpoint.tensorfile import DTYPE_NAMES, FilePlan
from hfdist.errors import CheckpointError, ResourceError

TRAINING_STATE = "training_state"
STATE_FILE = f"{TRAINING_STATE}/state.json"
OPTIMIZER_STEM = f"{TRAINING_STATE}/optimizer"
MODEL_STEM = "model"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")

MAX_FILE_BYTES = 2_000_000_000
"""Of one tensor file: small enough that the ranks hash a large checkpoint in parallel."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Equal on all ranks."""

    files: dict[str, FilePlan]
    """By path relative to the checkpoint."""
    places: dict[TensorId, tuple[str, int]]
    """File and byte offset of each tensor."""
    assignments: list[Assignment]
    steps: dict[str, int]
    """The optimizer's step count of each parameter."""
    index: dict[str, Any] | None
    """Content of the Hub's index, where the weights take several files."""


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    write_model_files: Callable[[Path], None],
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
        ResourceError: the disk is full; on all ranks alike.
    """
    final = folder / folders.step_name(step)
    plan, own = _agree_on_plan(pieces, weights_only=False)
    content = {"format": FORMAT, "step": step, "world_size": world_size(), "steps": plan.steps, "state": state}

    def begin() -> str:
        text = _to_json(content)
        folder.mkdir(parents=True, exist_ok=True)
        folders.remove_unfinished(folder)
        unfinished = folders.temporary(final)
        with _removed_on_failure(unfinished):
            _lay_out(unfinished, plan, write_model_files)
            (unfinished / STATE_FILE).parent.mkdir(exist_ok=True)
            (unfinished / STATE_FILE).write_text(text, encoding="utf-8")
        return unfinished.name

    def write_share() -> None:
        _write_elements(unfinished, plan, own)
        save_random_state(unfinished)

    unfinished = folder / on_rank_zero(begin)
    with _removed_on_failure(unfinished):
        on_all_ranks(write_share)
        manifest = Manifest(step=step, files=_hash_together(unfinished))
        on_rank_zero(lambda: _finish(unfinished, final, manifest))
    return final


def export_model(folder: Path, pieces: Iterable[Piece], write_model_files: Callable[[Path], None]) -> None:
    """Write the weights alone as a Hub folder; other files of `folder` stay. A collective.

    Args:
        folder: made if missing; an older model in it is replaced.
        pieces: what this rank holds; optimizer state in it is left out.
        write_model_files: writes config, tokenizer and the like into the given folder; called on rank 0.

    Raises:
        CheckpointError, ResourceError: as for `write_checkpoint`.
    """
    plan, own = _agree_on_plan(pieces, weights_only=True)

    def begin() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".tmp-{secrets.token_hex(4)}"
        with _removed_on_failure(unfinished):
            _lay_out(unfinished, plan, write_model_files)
        return unfinished.name

    unfinished = folder / on_rank_zero(begin)
    with _removed_on_failure(unfinished):
        on_all_ranks(lambda: _write_elements(unfinished, plan, own))
        on_rank_zero(lambda: _move_into(unfinished, folder))


def declare(pieces: Iterable[Piece]) -> list[Region]:
    """Describe pieces without their tensors.

    Raises:
        CheckpointError: a type that safetensors does not know.
    """
    regions = []
    for piece in pieces:
        if piece.view.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                "a type that a checkpoint cannot hold", where=f"{piece.name}/{piece.key}", found=piece.view.dtype
            )
        spec = TensorSpec(
            name=piece.name,
            key=piece.key,
            shape=tuple(piece.shape),
            dtype=DTYPE_NAMES[piece.view.dtype],
            itemsize_bytes=piece.view.element_size(),
        )
        regions.append(Region(spec=spec, start=piece.start, stop=piece.stop))
    return regions


def _agree_on_plan(pieces: Iterable[Piece], *, weights_only: bool) -> tuple[_Plan, list[Piece]]:
    own: list[Piece] = []
    steps: dict[str, int] = {}

    def list_own() -> dict[str, Any]:
        for piece in pieces:
            if piece.key == STEP:
                steps[piece.name] = int(piece.view)
            elif piece.key == WEIGHT or not weights_only:
                own.append(piece)
        return {"regions": [region.to_json() for region in declare(own)], "steps": steps}

    declared = on_all_ranks(list_own)
    regions = [[Region.from_json(values) for values in other["regions"]] for other in declared]
    assignments = assign_writers(regions)
    specs = {region.spec.id: region.spec for rank_regions in regions for region in rank_regions}
    return _plan(list(specs.values()), assignments, _merge_steps([other["steps"] for other in declared])), own


def _merge_steps(steps_by_rank: list[dict[str, int]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for steps in steps_by_rank:
        for name, step in steps.items():
            if merged.setdefault(name, step) != step:
                raise CheckpointError(
                    "the ranks disagree about how often a parameter was stepped",
                    where=name,
                    found=f"{merged[name]} and {step}",
                )
    return dict(sorted(merged.items()))


def _plan(specs: list[TensorSpec], assignments: list[Assignment], steps: dict[str, int]) -> _Plan:
    files: dict[str, FilePlan] = {}
    places: dict[TensorId, tuple[str, int]] = {}
    weights = pack_files([spec for spec in specs if spec.key == WEIGHT], MAX_FILE_BYTES)
    optimizer = pack_files([spec for spec in specs if spec.key != WEIGHT], MAX_FILE_BYTES)
    for stem, packed in ((MODEL_STEM, weights), (OPTIMIZER_STEM, optimizer)):
        for number, members in enumerate(packed, start=1):
            if not members:
                continue
            is_whole_model = stem == MODEL_STEM and len(packed) == 1
            part = "" if is_whole_model else f"-{number:05d}-of-{len(packed):05d}"
            path = f"{stem}{part}.safetensors"
            files[path] = tensorfile.plan_file({_name_in_file(spec): spec for spec in members})
            places |= {spec.id: (path, files[path].begins[_name_in_file(spec)]) for spec in members}
    index = None
    if len(weights) > 1:
        by_name = {spec.name: places[spec.id][0] for members in weights for spec in members}
        total = sum(spec.num_bytes for members in weights for spec in members)
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
    return _Plan(files=files, places=places, assignments=assignments, steps=steps, index=index)


def _name_in_file(spec: TensorSpec) -> str:
    return spec.name if spec.key == WEIGHT else f"{spec.name}/{spec.key}"


def _lay_out(folder: Path, plan: _Plan, write_model_files: Callable[[Path], None]) -> None:
    needed_bytes = sum(file_plan.num_bytes for file_plan in plan.files.values())
    free_bytes = shutil.disk_usage(folder.parent).free
    if needed_bytes > free_bytes:
        raise ResourceError(
            "the disk has no room for the checkpoint",
            where=str(folder.parent),
            found=f"{needed_bytes / 1e9:.2f} GB needed, {free_bytes / 1e9:.2f} GB free",
            hint="free space, or a smaller checkpoint.keep",
        )
    folder.mkdir()
    write_model_files(folder)
    for name, file_plan in plan.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        tensorfile.create(folder / name, file_plan)
    if plan.index is not None:
        (folder / INDEX_FILE).write_text(json.dumps(plan.index, indent=2), encoding="utf-8")


def _write_elements(folder: Path, plan: _Plan, own: list[Piece]) -> None:
    held: dict[TensorId, list[Piece]] = {}
    for piece in own:
        held.setdefault((piece.name, piece.key), []).append(piece)
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for assignment in plan.assignments:
            if assignment.writer != rank():
                continue
            name, begin = plan.places[assignment.spec.id]
            if name not in opened:
                opened[name] = os.open(folder / name, os.O_WRONLY)
                stack.callback(os.close, opened[name])
            elements = _elements(held[assignment.spec.id], assignment.start, assignment.stop)
            tensorfile.write_elements(opened[name], begin + assignment.start * elements.element_size(), elements)
        for descriptor in opened.values():
            os.fsync(descriptor)


def _elements(pieces: list[Piece], start: int, stop: int) -> torch.Tensor:
    piece = next(piece for piece in pieces if piece.start <= start and stop <= piece.stop)
    return piece.view.detach().reshape(-1)[start - piece.start : stop - piece.start]


def _hash_together(folder: Path) -> dict[str, FileRecord]:
    sizes = on_rank_zero(lambda: list_files(folder))
    share = share_out(sizes, world_size())[rank()]
    hashed = on_all_ranks(lambda: {name: hash_file(folder / name) for name in share})
    sums = {name: digest for part in hashed for name, digest in part.items()}
    return {name: FileRecord(num_bytes=size, sha256=sums[name]) for name, size in sizes.items()}


def _finish(unfinished: Path, final: Path, manifest: Manifest) -> None:
    folders.sync_tree(unfinished)
    (unfinished / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1), encoding="utf-8")
    folders.commit(unfinished, final)


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


def _to_json(content: dict[str, Any]) -> str:
    try:
        return json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError("the state to save holds a value that JSON cannot", found=error) from error


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        if rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise
