"""What `save_pretrained` writes of a model, and pieces of the model as ranks hold them in each kind of layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hfdist.checkpoint import export_model
from hfdist.checkpoint.hub_pieces import hub_pieces
from hfdist.checkpoint.piece import Piece
from hfdist.models.names.hub_names import find_hub_names
from hfdist.strategies.parameter_shards import ParameterShard
from hfdist.strategies.pieces import list_pieces

SAME, CONVERTED, WRONG = "same", "converted", "wrong"
"""How a type is saved: its own tensors; those of its files, which are others; not as `save_pretrained` does."""

NUM_RANKS = 3
"""That share elements; dimensions are halved."""


def original_files(model: PreTrainedModel, folder: Path, max_shard_size: int | str = "50GB") -> dict[str, bytes]:
    """Save a model, and give its files of weights by name."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


def how_saved(model: PreTrainedModel, folder: Path) -> str:
    """Compare what hfdist saves of a model with `save_pretrained`, from whole tensors and from the parts of ranks."""
    names, pieces = find_hub_names(model), list(list_pieces(model, None))
    export_model(folder / "own", pieces, lambda unfinished: None, names=names)
    own = {path.name: path.read_bytes() for path in (folder / "own").iterdir()}
    if own != original_files(model, folder / "original"):
        return WRONG
    whole = filled(hub_pieces(pieces, names))
    if any(differing(filled(hub_pieces(parts, names)), whole) for _, parts in cut_as_ranks(pieces)):
        return WRONG
    return CONVERTED if names.others else SAME


def cut_as_ranks(pieces: list[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    """Give the pieces of all ranks together, by the way in which whole ones are shared out."""
    yield "elements, as ZeRO has them", [part for piece in pieces for part in _elements(piece)]
    for dim in range(3):
        for packed in (1, 2):
            fits = [len(p.shape) > dim and p.shape[dim] % (2 * packed) == 0 for p in pieces]
            parts = [list(_halves(p, dim, packed)) if fit else [p] for p, fit in zip(pieces, fits, strict=True)]
            yield f"halves of {packed} along dimension {dim}", list(chain.from_iterable(parts))


def _elements(piece: Piece) -> Iterator[Piece]:
    flat, start = piece.view.reshape(-1), 0
    for part in flat.tensor_split(NUM_RANKS):
        if part.numel():
            yield replace(piece, start=start, view=part.clone())
        start += part.numel()


def _halves(piece: Piece, dim: int, packed: int) -> Iterator[Piece]:
    """Of each of several packed matrices, as tensor ranks have them."""
    size = piece.shape[dim] // packed // 2
    for rank in range(2):
        begins = [size * (2 * number + rank) for number in range(packed)]
        parts = tuple((begin, begin + size) for begin in begins)
        local = torch.cat([piece.view.narrow(dim, begin, size) for begin in begins], dim)
        shard = ParameterShard(shape=piece.shape, dim=dim, parts=parts)
        yield from shard.pieces(replace(piece, shape=tuple(local.shape), view=local))


def filled(pieces: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """Put pieces together. What none covers is NaN, or -1 of what is no float."""
    tensors: dict[str, torch.Tensor] = {}
    for piece in pieces:
        dtype = piece.view.dtype
        nothing = torch.nan if dtype.is_floating_point else -1 if dtype.is_signed else 0
        tensor = tensors.setdefault(piece.name, torch.full((piece.total,), nothing, dtype=dtype))
        rows = (
            piece.view.reshape(-1, piece.run or piece.view.numel()) if piece.view.numel() else piece.view.reshape(0, 0)
        )
        tensor.as_strided(rows.shape, (piece.pitch or piece.total, 1), piece.start).copy_(rows)
    return tensors


def differing(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Give the names that only one has, and those of other values."""
    names = tensors.keys() | others.keys()
    return [n for n in names if n not in tensors or n not in others or not torch.equal(tensors[n], others[n])]
