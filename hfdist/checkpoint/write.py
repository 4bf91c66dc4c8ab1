"""Saving: each rank writes the elements that it holds to their places in shared files; nothing is gathered.

start       the first rank makes a folder with the name of an unfinished one
lay out     ranks make the files of tensors at their full size; rank 0 writes all small files
write       each rank writes its elements, its random state and its hashes
finish      the first rank writes the manifest, and gives the folder its name
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, starmap
from pathlib import Path
from typing import Any, NamedTuple

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
"""Bytes that are copied from a device, checked, hashed and written while they are in the processor's cache."""

FLUSH_BYTES = 16 * 2**20
"""Bytes after which the disk is told to begin, while the next ones are hashed and written."""

_FULL = "the disk has no room for the checkpoint"
_SMALLER = "a smaller checkpoint.keep; the same command goes on from the last checkpoint"


class _Write(NamedTuple):
    """A place in a file, and the elements for it."""

    item: WriteItem
    elements: torch.Tensor


class _Begun(NamedTuple):
    """What a rank says before a folder is written. It travels as a list of these values."""

    num_bytes: int
    """Bytes of tensors that the rank writes."""
    name: str
    """Name of the unfinished folder; empty on ranks that do not lead a memory."""
    free_bytes: int
    """Bytes that are free there, before any rank has made a file."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a save needs of this rank."""

    plan: SavePlan
    """Which elements go where."""
    elements: list[torch.Tensor]
    """Elements of each source of the plan: live tensors, or copies."""
    write_files: Callable[[Path], object]
    """Writes all other files into the folder that it gets; called on rank 0."""
    random_state: RandomState | None = None
    """States of this rank's random generators; None: an export, which has neither these nor hashes."""

    def manifest(self, step: int, written: list[Part]) -> Manifest:
        """Make the manifest of a checkpoint.

        Args:
            step: number of optimizer steps that the state has done.
            written: the files that a single process has written, each as one part with its hash.
        """
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
        contents: what this rank writes.
        parent: the folder that gets the new one, on a file system that all ranks share, or those of a memory.
        start: gives the path in `parent` of the unfinished folder; called on the first rank of each memory.
        finish: gives the folder its place; called with the unfinished folder and the hashes of the files that a single
            process has written, on the first rank of each memory.
        group: the group of the thread that calls this; None: that of the thread that trains.
        memories: which ranks share `parent`; None: all ranks do.

    Raises:
        CheckpointError: files cannot be written; on all ranks alike.
        NumericsError: a trained parameter or its state is not finite; on all ranks alike.
        ResourceError: the disk is full; on all ranks alike.
    """
    plan, memories = contents.plan, memories or Memories.shared()
    group = group or control_group()

    def lay_out() -> list[Part]:
        with _room_for(num_bytes, parent):
            if num_bytes > leader.free_bytes:
                raise no_room(_FULL, parent, num_bytes, _SMALLER)
            return _lay_out(unfinished, contents, memories)

    def write_own() -> list[Part]:
        elements = _elements_of_items(contents, group)
        with _room_for(num_bytes, parent):
            return _write_own(unfinished, contents, elements, _laid_out(plan, memories))

    begun = [_Begun(*values) for values in on_all_ranks(lambda: _begin(plan, parent, start, memories), group)]
    leader = begun[memories.ranks(memories.own)[0]]
    # All memories use the name that rank 0 has drawn.
    unfinished = parent / begun[0].name
    num_bytes = plan.header_bytes + sum(begun[number].num_bytes for number in memories.held())
    with removed_on_failure(unfinished, memories):
        # No other rank makes it: one that does not see this disk would make a folder that nobody removes.
        on_all_ranks(lambda: _make_folder(unfinished, contents) if memories.leads else None, group, is_told=False)
        # Rank 0 alone has written small files.
        small, *_ = _parts(on_all_ranks(lay_out, group))
        # Who writes no manifest, and sends nothing on, needs no hashes.
        of_ranks = _parts(on_all_ranks(write_own, group, is_told=memories.leads or memories.count > 1))
        if memories.count > 1:
            _spread(unfinished, small, of_ranks, memories, group)
        on_all_ranks(lambda: finish(unfinished, [*small, *chain(*of_ranks)]) if memories.leads else None, group)


def _begin(plan: SavePlan, parent: Path, start: Callable[[], Path], memories: Memories) -> _Begun:
    num_bytes = sum(item.end - item.begin for item in plan.items)
    if not memories.leads:
        return _Begun(num_bytes, "", 0)
    return _Begun(num_bytes, start().name, shutil.disk_usage(parent).free)


def _elements_of_items(contents: Contents, group: ControlGroup | None) -> list[torch.Tensor]:
    """Give the elements of each item of the plan: a source of this rank, or rows that are put together from columns."""
    sources, plan = contents.elements, contents.plan
    joined = join_columns(plan.transfers, sources, None if group is None else group.pairs)
    return [joined[index] if item.source is None else sources[item.source] for index, item in enumerate(plan.items)]


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
    """Give each folder what it keeps of other memories: small files, all hashes, and the shares of the one before.

    Args:
        unfinished: the folder.
        small: the small files that rank 0 has written.
        of_ranks: for each rank, its file of random state and its file of hashes.
        memories: which ranks share a folder.
        group: the group of the thread that calls this.
    """
    for_all = [[hashes] for _, hashes in of_ranks]
    for_all[0] += small
    move_parts(unfinished, memories.list_for_all(for_all), group)
    shares = [[random, *read_hashes(unfinished, hashes)] for random, hashes in of_ranks]
    move_parts(unfinished, memories.list_spread(shares), group)


def _lay_out(unfinished: Path, contents: Contents, memories: Memories) -> list[Part]:
    """Make this rank's share of the tensor files at their full size, and on rank 0 all small files.

    Returns:
        The small files as parts: they are whole now.
    """
    plan = contents.plan
    small: list[Part] = []
    if rank() == 0:
        contents.write_files(unfinished)
        if plan.index is not None:
            write_json(unfinished / INDEX_FILE, json.dumps(plan.index, indent=2, sort_keys=True) + "\n")
        # Meanwhile other ranks make files of the plan in the same folder.
        small = [hash_file(unfinished, name) for name in list_files(unfinished) if name not in plan.files]
    for name in _laid_out(plan, memories):
        safetensors_io.create(unfinished / name, plan.files[name], is_sparse=memories.count > 1)
    return small


def _laid_out(plan: SavePlan, memories: Memories) -> list[str]:
    """List the tensor files that this rank makes: the ranks of a memory take turns.

    If the rank whose turn it is writes nothing into the file, the next one that does makes it. So a file is synced once
    by each of its writers, and by no other rank.
    """
    makers = memories.ranks(memories.own)
    names = []
    for index, name in enumerate(plan.files):
        turn = index % len(makers)
        # Whether each rank writes into the file, from the one whose turn it is; `argmax` finds the first that does.
        writes_from_turn = np.roll(plan.writers[makers, index], -turn)
        distance = int(writes_from_turn.argmax())
        if makers[(turn + distance) % len(makers)] == rank():
            names.append(name)
    return names


def _write_own(
    unfinished: Path, contents: Contents, elements: list[torch.Tensor], laid_out: Iterable[str]
) -> list[Part]:
    """Write this rank's elements to their places, and then two files of its own: its random state, and its hashes.

    Args:
        unfinished: the folder.
        contents: what this rank writes.
        elements: elements of each item of the plan.
        laid_out: tensor files that this rank has made.

    Returns:
        The two files as parts, in this order; of an export, which has no hashes, nothing.
    """
    parts = _write_shard(unfinished, contents.plan.items, elements)
    # Synced at the end, as the disk has begun meanwhile; also files that this rank has made and not written into.
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


def _parts(of_ranks: list[list[list[Any]]]) -> list[list[Part]]:  # JSON has lists in place of named tuples
    return [[Part(*values) for values in of_rank] for of_rank in of_ranks]


@contextlib.contextmanager
def _room_for(num_bytes: int, folder: Path) -> Iterator[None]:
    """Turn the OSError of a full disk in the block into a ResourceError; `num_bytes` are needed in all."""
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise no_room(_FULL, folder, num_bytes, _SMALLER) from error
        raise


def no_room(what: str, folder: Path, num_bytes: int, hint: str) -> ResourceError:
    """Make the error of a full disk, with the bytes that are needed in `folder` and those that are free."""
    found = f"{num_bytes:,} bytes needed, {shutil.disk_usage(folder).free:,} bytes free"
    return ResourceError(what, where=str(folder), found=found, hint=f"free space, or {hint}")


@contextlib.contextmanager
def removed_on_failure(path: Path, memories: Memories | None = None) -> Iterator[None]:
    """Remove an unfinished folder if the block fails: on the first rank of each memory; None: on rank 0."""
    try:
        yield
    except Exception:
        is_remover = rank() == 0 if memories is None else memories.leads
        if is_remover:
            shutil.rmtree(path, ignore_errors=True)
        raise


def list_files(folder: Path) -> list[str]:
    """Give the relative paths of all files below `folder`."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


# ---- this rank's elements, hashed on the way to the disk ----


def _write_shard(folder: Path, items: Sequence[WriteItem], elements: Sequence[torch.Tensor]) -> list[Part]:
    """Write elements to their places in files that are laid out, and hash them.

    Returns:
        The parts of files that were written.

    Raises:
        NumericsError: an element of a trained parameter or of its state is not finite.
    """
    parts: list[Part] = []
    # One file after the other: a process may have only so many open.
    for file, runs in groupby(
        _runs(starmap(_Write, zip(items, elements, strict=True))), key=lambda run: run[0].item.file
    ):
        with _named(folder / file), (folder / file).open("rb+", buffering=0) as opened:
            parts += [_write_run(opened.fileno(), run) for run in runs]
    return parts


def _runs(writes: Iterable[_Write]) -> Iterator[list[_Write]]:
    """Group writes that follow each other in a file without a gap, up to PART_BYTES."""
    run: list[_Write] = []
    for write in writes:
        if run:
            first, last, item = run[0].item, run[-1].item, write.item
            is_next = item.file == last.file and item.begin == last.end
            if not is_next or item.end - first.begin > PART_BYTES:
                yield run
                run = []
        run.append(write)
    if run:
        yield run


def _write_run(descriptor: int, run: Sequence[_Write]) -> Part:
    """Write elements that follow each other in an open file, and give them as one part with its hash."""
    digest = xxhash.xxh3_128()
    file, begin = run[0].item.file, run[0].item.begin
    position = flushed = begin
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
    return Part(file, begin, position - begin, digest.hexdigest())


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite; whole numbers always are."""
    if not values.is_floating_point():
        return True
    # A sum is 30 times as fast. It may overflow where all values are finite: then each one is looked at.
    if bool(torch.isfinite(values.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(values).all())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block: calls with a descriptor do not say in which file they failed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
