"""Saving: nothing is gathered. The ranks lay the files out together, and each writes the elements that it holds."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hfdist.atomic_write import sync
from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.columns import join_columns
from hfdist.checkpoint.manifest import Manifest, Part, hash_file, read_hashes, write_hashes, write_json
from hfdist.checkpoint.memories import Memories, move_parts
from hfdist.checkpoint.random_state import RandomState, random_file
from hfdist.checkpoint.save_plan import INDEX_FILE, TRAINING_STATE, SavePlan, WriteItem
from hfdist.collectives import on_all_ranks, rank
from hfdist.control_group import ControlGroup, control_group
from hfdist.errors import NumericsError, ResourceError
from hfdist.failures import is_full_disk

PART_BYTES = 256 * 2**20
"""A longer run is hashed in several parts, so that the ranks that verify it later can share the work."""

CHUNK_BYTES = 4 * 2**20
"""Copied from a device, checked, hashed and written while it is in the processor's cache."""

FLUSH_BYTES = 16 * 2**20
"""The disk begins with so many bytes while the next are hashed and written."""

_FULL = "the disk has no room for the checkpoint"
_SMALLER = "a smaller checkpoint.keep; the same command goes on from the last checkpoint"

_Write = tuple[WriteItem, torch.Tensor]
"""A place, and the elements for it."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a save needs of this rank."""

    plan: SavePlan
    elements: list[torch.Tensor]
    """Elements of each source of the plan: live tensors, or copies."""
    write_files: Callable[[Path], object]
    """Writes all other files; called on rank 0."""
    random_state: RandomState | None = None
    """States of this rank's generators; None: an export, which has neither these nor hashes."""

    def manifest(self, step: int, written: list[Part]) -> Manifest:
        """Give the manifest of a checkpoint, from the hashes of the files that a single process has written."""
        shared = {name: file.num_bytes for name, file in self.plan.files.items()}
        return Manifest(step=step, files=shared | {part.file: part.num_bytes for part in written}, parts=written)


def write_folder(
    contents: Contents,
    parent: Path,
    start: Callable[[], Path],
    finish: Callable[[Path, list[Part]], None],
    group: ControlGroup | None = None,
    memories: Memories | None = None,
) -> None:
    """Write a folder, complete or not at all: the ranks lay its files out, and then fill them. A collective.

    Args:
        contents: as this rank has them.
        parent: of the folder, on a file system that all ranks share, if `memories` does not say otherwise.
        start: gives the folder's name while it is unfinished, in `parent`; called on the first rank of each memory.
        finish: gets that folder, and the hashes of the files that a single process has written; puts it into its
            place; called on the first rank of each memory.
        group: in which the thread that calls it speaks; None: the one that trains.
        memories: which ranks share `parent`; None: all.

    Raises:
        CheckpointError: files that cannot be written; on all ranks alike.
        NumericsError: a trained parameter or its state is not finite; on all ranks alike.
        ResourceError: the disk is full; on all ranks alike.
    """
    plan, memories = contents.plan, memories or Memories.shared()
    group = group or control_group()

    def begin() -> list[object]:
        num_bytes = sum(item.end - item.begin for item in plan.items)
        return [num_bytes, *([start().name, shutil.disk_usage(parent).free] if memories.leads else [])]

    def lay_out() -> list[Part]:
        with _room_for(num_bytes, parent):
            if num_bytes > free_bytes:
                raise no_room(_FULL, parent, num_bytes, _SMALLER)
            return _lay_out(unfinished, contents, memories)

    def write_own() -> list[Part]:
        given = contents.elements
        joined = join_columns(plan.transfers, given, None if group is None else group.pairs)
        elements = [joined[n] if item.source is None else given[item.source] for n, item in enumerate(plan.items)]
        with _room_for(num_bytes, parent):
            return _write_own(unfinished, contents, elements, _laid_out(plan, memories))

    begun = on_all_ranks(begin, group)
    # Free before any rank had made a file.
    free_bytes = begun[memories.ranks(memories.own)[0]][2]
    unfinished = parent / begun[0][1]
    num_bytes = plan.header_bytes + sum(begun[number][0] for number in memories.held())
    with removed_on_failure(unfinished, memories):
        # No other rank makes it: one that does not see this disk would make a folder that nobody removes.
        on_all_ranks(lambda: _make_folder(unfinished, contents) if memories.leads else None, group, is_told=False)
        small = _parts(on_all_ranks(lay_out, group))[0]
        # Who writes no manifest, and sends nothing on, needs no hashes.
        of_ranks = _parts(on_all_ranks(write_own, group, is_told=memories.leads or memories.count > 1))
        if memories.count > 1:
            _spread(unfinished, small, of_ranks, memories, group)
        on_all_ranks(lambda: finish(unfinished, [*small, *chain(*of_ranks)]) if memories.leads else None, group)


def _make_folder(unfinished: Path, contents: Contents) -> None:
    unfinished.mkdir()
    if contents.random_state is not None:
        (unfinished / TRAINING_STATE).mkdir()


def _spread(
    unfinished: Path,
    small: list[Part],
    of_ranks: list[list[Part]],
    memories: Memories,
    group: ControlGroup | None,
) -> None:
    """Give each folder what it keeps: the small files and all hashes, and then what these say of others' shares."""
    for_all = [[hashes] for _, hashes in of_ranks]
    for_all[0] += small
    move_parts(unfinished, memories.list_for_all(for_all), group)
    shares = [[random, *read_hashes(unfinished, hashes)] for random, hashes in of_ranks]
    move_parts(unfinished, memories.list_spread(shares), group)


def _lay_out(unfinished: Path, contents: Contents, memories: Memories) -> list[Part]:
    """Make this rank's share of the files at their full size; give the hashes of those that are whole, on rank 0."""
    plan = contents.plan
    small: list[Part] = []
    if rank() == 0:
        contents.write_files(unfinished)
        if plan.index is not None:
            write_json(unfinished / INDEX_FILE, json.dumps(plan.index, indent=2, sort_keys=True) + "\n")
        # Beside them others lay out those of the plan.
        small = [hash_file(unfinished, name) for name in list_files(unfinished) if name not in plan.files]
    for name in _laid_out(plan, memories):
        safetensors_io.create(unfinished / name, plan.files[name], is_sparse=memories.count > 1)
    return small


def _laid_out(plan: SavePlan, memories: Memories) -> list[str]:
    """List the files that this rank makes: each one in turn, or the next rank that writes into the file.

    A file is then synced once by each of its writers, and by no other rank.
    """
    makers = memories.ranks(memories.own)
    found = []
    for index, name in enumerate(plan.files):
        turn = index % len(makers)
        distance = int(np.roll(plan.writers[makers, index], -turn).argmax())
        if makers[(turn + distance) % len(makers)] == rank():
            found.append(name)
    return found


def _write_own(
    unfinished: Path, contents: Contents, elements: list[torch.Tensor], laid_out: Iterable[str]
) -> list[Part]:
    """Write this rank's share; give the hashes of the files that it alone has written, that of its hashes last."""
    parts = _write_shard(unfinished, contents.plan.items, elements)
    # Afterwards: meanwhile the disk has had something to do. A file that it has laid out may have its header alone.
    for file in dict.fromkeys([*(part.file for part in parts), *laid_out]):
        with _named(unfinished / file):
            sync(unfinished / file)
    if contents.random_state is None:
        return []
    if rank() == 0:
        parts += [Part.first(name, file.header) for name, file in contents.plan.files.items()]
    name, content = random_file(rank()), contents.random_state.to_bytes()
    (unfinished / name).write_bytes(content)
    written = [Part.first(name, content), write_hashes(unfinished, rank(), parts)]
    for part in written:
        sync(unfinished / part.file)
    return written


def _parts(of_ranks: list[list[list[Any]]]) -> list[list[Part]]:
    return [[Part(*values) for values in of_rank] for of_rank in of_ranks]


@contextlib.contextmanager
def _room_for(num_bytes: int, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise no_room(_FULL, folder, num_bytes, _SMALLER) from error
        raise


def no_room(what: str, folder: Path, num_bytes: int, hint: str) -> ResourceError:
    """Give the error of a disk that is full, with what is needed there and what is free."""
    found = f"{num_bytes:,} bytes needed, {shutil.disk_usage(folder).free:,} bytes free"
    return ResourceError(what, where=str(folder), found=found, hint=f"free space, or {hint}")


@contextlib.contextmanager
def removed_on_failure(path: Path, memories: Memories | None = None) -> Iterator[None]:
    """Remove what is not finished if the block fails; on the first rank of each memory, or of all."""
    try:
        yield
    except Exception:
        if rank() == 0 if memories is None else memories.leads:
            shutil.rmtree(path, ignore_errors=True)
        raise


def list_files(folder: Path) -> list[str]:
    """Give the relative paths of all files below `folder`."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


# ---- this rank's elements, hashed on the way to the disk ----


def _write_shard(folder: Path, items: Sequence[WriteItem], elements: Sequence[torch.Tensor]) -> list[Part]:
    """Write elements to their places in files that are laid out, and give their hashes.

    It is a `NumericsError` if an element of a trained parameter or of its state is not finite.
    """
    parts: list[Part] = []
    # One file after the other: a process may have only so many open.
    for file, runs in groupby(_runs(zip(items, elements, strict=True)), key=lambda run: run[0][0].file):
        with _named(folder / file), (folder / file).open("rb+", buffering=0) as opened:
            parts += [_write_run(opened.fileno(), run) for run in runs]
    return parts


def _runs(writes: Iterable[_Write]) -> Iterator[list[_Write]]:
    """Join neighbours in a file, up to the size of a part."""
    run: list[_Write] = []
    for item, elements in writes:
        is_next = run and (item.file, item.begin) == (run[-1][0].file, run[-1][0].end)
        if run and not (is_next and item.end - run[0][0].begin <= PART_BYTES):
            yield run
            run = []
        run.append((item, elements))
    if run:
        yield run


def _write_run(descriptor: int, run: Sequence[_Write]) -> Part:
    digest = xxhash.xxh3_128()
    begin = position = flushed = run[0][0].begin
    for item, elements in run:
        for chunk in elements.split(max(1, CHUNK_BYTES // elements.element_size())):
            host = chunk.detach().contiguous().cpu()
            if item.is_trained and not _is_finite(host):
                raise NumericsError(
                    "a value that is not finite was about to be saved: no checkpoint was written",
                    where="/".join(item.id),
                    hint="the last checkpoint is good: go on from it with a lower optimizer.lr or train.max_grad_norm",
                )
            data = host.view(torch.uint8).numpy().data
            digest.update(data)
            while data:
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
            if position - flushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                # A hint, which not all systems and file systems take. Without it the disk waits for the fsync.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(descriptor, flushed, position - flushed, os.POSIX_FADV_DONTNEED)
                flushed = position
    return Part(run[0][0].file, begin, position - begin, digest.hexdigest())


def _is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point() or bool(torch.isfinite(values.sum(dtype=torch.float32))):
        return True
    # A sum is 30 times as fast, and overflows now and then.
    return bool(torch.isfinite(values).all())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Calls with a descriptor do not say in which file they failed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
