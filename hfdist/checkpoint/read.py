"""Loading a checkpoint of any layout: each rank reads the elements that its own layout wants into its live tensors."""

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
    """Bytes of a file, from offset `begin` to before `end`."""

    file: Path
    begin: int
    end: int


def read_checkpoint(
    path: Path,
    pieces: Iterable[Piece],
    fetch: Callable[[list[ByteRange]], None] | None = None,
    names: HubNames | None = None,
) -> dict[str, Any]:
    """Read the tensors and numbers of a checkpoint into pieces. A collective.

    Float32 copies are read from the weights where the checkpoint has no copies, and weights without copies from the
    copies where it has some, so that the best saved precision is used. An `OPTIONAL` tensor stays as it is where the
    checkpoint has none of the same shape.

    Args:
        path: a checkpoint; its hashes are not checked again here (`find_newest` and `verify` do that).
        pieces: the pieces of this rank, whose views are filled. Those of all ranks together must be all that was saved.
        fetch: called on all ranks with the bytes that each is about to read, if they may not be there yet.
        names: names of the tensors in the model's files, where they differ from those of the model.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: the checkpoint is unfinished or damaged, or is one of another model, other trainable parameters
            or another type; with the names, and on all ranks alike.
    """
    # Rank 0 reads for all: thousands of ranks would each open thousands of files for their headers.
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
        """Names of the tensors in the model's files, as this checkpoint has them."""
        self.tensors: list[Piece] = []
        """The pieces that are read from files of tensors."""
        self.numbers: list[Piece] = []
        """The pieces that are read from JSON, such as step counts."""

    def regions_of(self, pieces: Iterable[Piece]) -> list[Region]:
        """Take the pieces that this rank wants, and give their regions."""
        for piece in hub_pieces(pieces, self.names):
            (self.numbers if is_number(piece.key) else self.tensors).append(piece)
        return regions_of([*self.tensors, *self.numbers])


def _names_in(saved: Saved, names: HubNames | None) -> HubNames | None:
    """Choose the names that most of a checkpoint's weights have: a run of other files may have written it."""
    if names is None:
        return None

    def num_found(candidate: HubNames) -> int:
        return sum((name, WEIGHT) in saved.entries for name in candidate.shapes)

    return max((names, *names.others), key=num_found)


def _usable(saved: Saved, wanted: dict[TensorId, TensorSpec]) -> set[TensorId]:
    """Give the tensors that were saved in the shape in which they are wanted."""
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
    """Give the entry from which each wanted tensor is read.

    Raises:
        CheckpointError: something wanted was not saved, or something saved is not wanted, or has another shape or type.
    """
    sources: dict[TensorId, Entry] = {}
    missing, mismatched = [], []
    # The optimizer has a number for each parameter that it steps.
    trained = {name for name, key in wanted if is_number(key)}
    if names is not None:
        trained |= names.names_of(trained)
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
    """Give the entry from which a tensor is read; None: there is none.

    Float32 copies and weights stand in for each other, copies first. A weight with a wanted copy is read as it is.
    """
    has_stand_in = key == MASTER or (key == WEIGHT and (name, MASTER) not in wanted)
    if has_stand_in and (name, MASTER) in saved.entries:
        return saved.entries[name, MASTER]
    return saved.entries.get((name, WEIGHT if has_stand_in else key))


def _fits(wanted: dict[TensorId, TensorSpec], trained: set[str], spec: TensorSpec, saved: torch.dtype) -> bool:
    """Whether a saved type may become that of a wanted tensor.

    Only without loss; except for weights that this layout rounds by design: those with a float32 copy, or not trained.
    """
    own = DTYPES[spec.dtype]
    if saved == own:
        return True
    if not (saved.is_floating_point and own.is_floating_point):
        return False
    is_trained_as_it_is = (spec.name, MASTER) not in wanted and spec.name in trained
    is_rounded = spec.key == WEIGHT and not is_trained_as_it_is
    return is_rounded or torch.promote_types(saved, own) == own


def _range_of(piece: Piece, entry: Entry) -> ByteRange:
    """Give the bytes from the first to the last element of a piece."""
    size = entry.dtype.itemsize
    return ByteRange(entry.path, entry.begin + piece.start * size, entry.begin + piece.stop * size)


@torch.no_grad()
def _fill(pieces: list[Piece], sources: dict[TensorId, Entry]) -> None:
    """Read the elements of pieces into their views."""
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(sources[piece.name, piece.key].path, []).append(piece)
    # One file after the other: a process may have only so many open.
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
    """Set step counts and other numbers.

    Parameters that share one number in memory, as in ZeRO's groups, get the largest of those that were saved for them.
    """
    # Largest number by the address of its tensor.
    largest: dict[int, float] = {}
    for piece in pieces:
        saved, address = numbers[piece.name, piece.key], piece.view.data_ptr()
        largest[address] = max(saved, largest.get(address, saved))
    for piece in pieces:
        number = largest[piece.view.data_ptr()]
        piece.view.fill_(number)
        if piece.set_number is not None:
            piece.set_number(number)
