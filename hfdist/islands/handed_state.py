"""The whole state of an island as bytes, which another island takes into its own pieces if they are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from hfdist.checkpoint.piece import Piece
from hfdist.islands.segment import Segment
from hfdist.islands.vectors import is_finite
from hfdist.messages.message import Message


def write_state(pieces: Sequence[Piece], state: Mapping[str, object]) -> list[bytes]:
    """Give a header with `state` and what the pieces are, and then the content of each piece."""
    header = {"state": state, "pieces": [_describe(piece) for piece in pieces]}
    return [json.dumps(header).encode(), *map(_bytes_of, pieces)]


def find_mismatch(header: Message, contents: Sequence[bytes], pieces: Sequence[Piece]) -> str | None:
    """Say why the state that another island has sent does not fit these pieces; None: it does."""
    state = header.mapping("state")
    state.integer("step")
    if header.list("pieces") != [_describe(piece) for piece in pieces]:
        return "its state is of another model or layout: the same overrides for all islands"
    if [len(content) for content in contents] != [piece.view.nbytes for piece in pieces]:
        return "its state is of another length"
    if not all(map(_has_finite, pieces, contents)):
        return "its state is not finite"
    return None


def take_state(pieces: Sequence[Piece], contents: Sequence[bytes]) -> None:
    """Take contents that fit into pieces."""
    for piece, content in zip(pieces, contents, strict=True):
        values = _values_of(piece, content)
        piece.view.detach().copy_(values.view(piece.view.shape))
        if piece.set_number is not None:
            piece.set_number(values.item())


def _has_finite(piece: Piece, content: bytes) -> bool:
    return not piece.view.is_floating_point() or is_finite(_values_of(piece, content))


def _describe(piece: Piece) -> list[object]:
    name, shape, *numbers = Segment.of(piece)
    return [name, piece.key, list(shape), *numbers, str(piece.view.dtype)]


def _bytes_of(piece: Piece) -> bytes:
    return piece.view.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _values_of(piece: Piece, content: bytes) -> torch.Tensor:
    view = piece.view.detach()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(view.dtype) if content else view.new_empty(0)
