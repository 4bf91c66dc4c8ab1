"""Loading: every rank reads the elements of its own layout into the views where they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.holders import gather_specs
from hfdist.checkpoint.hub_pieces import hub_pieces
from hfdist.checkpoint.manifest import read_manifest
from hfdist.checkpoint.piece import MASTER, OPTIONAL, WEIGHT, Piece, is_number
from hfdist.checkpoint.regions import Region
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, Entry, TensorId, TensorSpec
from hfdist.checkpoint.save_plan import regions_of
from hfdist.checkpoint.saved import Saved, open_saved
from hfdist.collectives import on_all_ranks, on_rank_zero
from hfdist.errors import CheckpointError
from hfdist.models.names.hub_names import HubNames
from hfdist.units import list_first

logger = logging.getLogger(__name__)


class ByteRange(NamedTuple):
    """Bytes of a file, from `begin` to before `end`."""

    file: Path
    begin: int
    end: int


def read_checkpoint(
    path: Path,
    pieces: Iterable[Piece],
    fetch: Callable[[list[ByteRange]], None] | None = None,
    names: HubNames | None = None,
) -> dict[str, Any]:
    """Fill the views of `pieces` and give back the `state` that was saved. A collective.

    Any layout reads any checkpoint. Float32 copies are read from the weights where the checkpoint has none, and
    weights without copies from the copies where it has some, so the best precision that was saved is used. What is
    `OPTIONAL` stays as it is where the checkpoint has none of the same shape.

    Args:
        path: a checkpoint; its hashes are not checked again here (`find_newest` and `verify` do that).
        pieces: where this rank wants what; between them the ranks must want exactly what was saved.
        fetch: called on all ranks with what each is about to read, if it may not be there yet.
        names: the tensors of the model's files, where those are not its own.

    Raises:
        CheckpointError: an unfinished or damaged checkpoint, or one of another model, other trainable parameters or
            another type; with the names, and on all ranks alike.
    """
    # Once for all ranks: thousands would open thousands of files for their headers.
    saved = Saved.from_json(path, on_rank_zero(lambda: open_saved(path, read_manifest(path)).to_json(path)))
    reading = _Reading(saved, names)
    own: list[Region] = []
    on_all_ranks(lambda: own.extend(reading.regions_of(pieces)))
    wanted = gather_specs(own)
    left_out = {(name, key) for name, key in wanted if key.startswith(OPTIONAL)} - _usable(saved, wanted)
    if left_out:
        logger.warning("%s is not read: the checkpoint has none of this layout", _list_keys(left_out))
    wanted = {tensor: spec for tensor, spec in wanted.items() if tensor not in left_out}
    tensors = [piece for piece in reading.tensors if (piece.name, piece.key) in wanted]
    sources = _match(path, saved, wanted, reading.names)
    if fetch is not None:
        fetch([_range_of(piece, sources[piece.name, piece.key]) for piece in tensors])
    on_all_ranks(lambda: _fill(tensors, sources))
    _set_numbers(reading.numbers, saved.numbers)
    return saved.state


class _Reading:
    """The pieces that this rank wants of a checkpoint."""

    def __init__(self, saved: Saved, names: HubNames | None) -> None:
        self.names = _names_in(saved, names)
        """The tensors of the model's files, as the checkpoint has them."""
        self.tensors: list[Piece] = []
        self.numbers: list[Piece] = []

    def regions_of(self, pieces: Iterable[Piece]) -> list[Region]:
        """Give the regions of the wanted pieces."""
        for piece in hub_pieces(pieces, self.names):
            (self.numbers if is_number(piece.key) else self.tensors).append(piece)
        return regions_of([*self.tensors, *self.numbers])


def _names_in(saved: Saved, names: HubNames | None) -> HubNames | None:
    """Give the names that a checkpoint has: it may be older than those of the files, or of another start's."""
    if names is None:
        return None
    return max((names, *names.others), key=lambda one: sum((name, WEIGHT) in saved.entries for name in one.shapes))


def _usable(saved: Saved, wanted: dict[TensorId, TensorSpec]) -> set[TensorId]:
    """List what is saved just as it is wanted."""
    return {
        tensor
        for tensor, spec in wanted.items()
        if tensor in saved.entries and spec.shape == saved.entries[tensor].shape
    }


def _list_keys(tensors: Iterable[TensorId]) -> str:
    return ", ".join(sorted({key.removeprefix(OPTIONAL) for _, key in tensors}))


def _match(
    path: Path, saved: Saved, wanted: dict[TensorId, TensorSpec], names: HubNames | None
) -> dict[TensorId, Entry]:
    """Say from which entry each wanted tensor is read; everything saved must be wanted and the other way round."""
    sources: dict[TensorId, Entry] = {}
    missing, mismatched = [], []
    trained = {name for name, key in wanted if is_number(key)}
    trained |= set() if names is None else names.names_of(trained)
    for (name, key), spec in wanted.items():
        if is_number(key):
            if (name, key) not in saved.numbers:
                missing.append(f"{name}/{key}")
            continue
        entry = _source(saved, wanted, name, key)
        if entry is None:
            missing.append(f"{name}/{key}")
        elif entry.shape != spec.shape or not _fits(wanted, trained, spec, entry.dtype):
            found = f"{DTYPE_NAMES[entry.dtype]}{list(entry.shape)}"
            mismatched.append(f"{name}/{key}: {found}, not {spec}")
        else:
            sources[name, key] = entry
    unwanted = [
        f"{name}/{key}"
        for name, key in saved.entries
        if (name, key) not in wanted
        and not (key == MASTER and (name, WEIGHT) in wanted)
        and not key.startswith(OPTIONAL)
    ]
    unwanted += ["/".join(number) for number in saved.numbers if number not in wanted]
    problems = {"missing in it": missing, "unknown to this run": unwanted, "of another shape or type": mismatched}
    found = "; ".join(f"{what}: {list_first(sorted(tensors))}" for what, tensors in problems.items() if tensors)
    if found:
        raise CheckpointError(
            "the checkpoint is not of this model, or of another choice of trainable parameters",
            where=str(path),
            found=found,
            hint="the config that the run was started with, or another run.name for a new run",
        )
    return sources


def _source(saved: Saved, wanted: dict[TensorId, TensorSpec], name: str, key: str) -> Entry | None:
    """Give the entry that a tensor is read from; None: there is none.

    Float32 copies and weights stand in for each other, copies first.
    """
    if key == MASTER or (key == WEIGHT and (name, MASTER) not in wanted):
        return saved.entries.get((name, MASTER)) or saved.entries.get((name, WEIGHT))
    return saved.entries.get((name, key))


def _fits(wanted: dict[TensorId, TensorSpec], trained: set[str], spec: TensorSpec, saved: torch.dtype) -> bool:
    """Types may only change without loss, except for weights that are rounded in this layout by design."""
    own = DTYPES[spec.dtype]
    if saved == own:
        return True
    if not (saved.is_floating_point and own.is_floating_point):
        return False
    is_trained_as_it_is = (spec.name, MASTER) not in wanted and spec.name in trained
    is_rounded = spec.key == WEIGHT and not is_trained_as_it_is
    return is_rounded or torch.promote_types(saved, own) == own


def _range_of(piece: Piece, entry: Entry) -> ByteRange:
    size = entry.dtype.itemsize
    return ByteRange(entry.path, entry.begin + piece.start * size, entry.begin + piece.stop * size)


@torch.no_grad()
def _fill(pieces: list[Piece], sources: dict[TensorId, Entry]) -> None:
    """Read the elements of pieces into their views."""
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(sources[piece.name, piece.key].path, []).append(piece)
    # One after the other: a process may have only so many open.
    for path, of_file in by_file.items():
        with path.open("rb", buffering=0) as file:
            for piece in of_file:
                entry = sources[piece.name, piece.key]
                # A view that cannot be flattened in place is read through a copy.
                elements = piece.view.detach().reshape(-1)
                begin = entry.begin + piece.start * entry.dtype.itemsize
                safetensors_io.read_elements(file.fileno(), begin, entry.dtype, elements, piece.run, piece.pitch)
                if elements.data_ptr() != piece.view.data_ptr():
                    piece.view.detach().copy_(elements.view(piece.view.shape))


def _set_numbers(pieces: list[Piece], numbers: dict[TensorId, float]) -> None:
    """Set step counts and the like. Parameters that share one (ZeRO's groups) get the largest of theirs."""
    largest: dict[int, float] = {}
    for piece in pieces:
        number, place = numbers[piece.name, piece.key], piece.view.data_ptr()
        largest[place] = max(number, largest.get(place, number))
    for piece in pieces:
        piece.view.fill_(largest[piece.view.data_ptr()])
        if piece.set_number is not None:
            piece.set_number(largest[piece.view.data_ptr()])
