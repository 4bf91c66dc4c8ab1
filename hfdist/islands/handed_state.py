"""The whole state of an island as bytes: one island writes it, and another takes it over if it has the same pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from hfdist.checkpoint.piece import Piece
from hfdist.islands.segment import Segment
from hfdist.islands.vectors import is_finite
from hfdist.messages.message import Message


def write_state(pieces: Sequence[Piece], state: Mapping[str, object]) -> list[bytes]:
    """Write the state of an island.

    Args:
        pieces: the live tensors.
        state: what the other island needs besides tensors, as JSON.

    Returns:
        A header (JSON with `state` and a description of each piece), and then the bytes of each piece.
    """
    header = {"state": state, "pieces": [_describe(piece) for piece in pieces]}
    return [json.dumps(header).encode(), *map(_bytes_of, pieces)]


def find_mismatch(header: Message, contents: Sequence[bytes], pieces: Sequence[Piece]) -> str | None:
    """Say why the state of another island cannot be taken over; None: it can.

    Args:
        header: the header that `write_state` has given there.
        contents: the bytes of each piece.
        pieces: the pieces here.

    Raises:
        NotAMessageError: the header is not one that `write_state` gives.
    """
    header.mapping("state").integer("step")
    if header.list("pieces") != [_describe(piece) for piece in pieces]:
        return "its state is of another model or layout: the same overrides for all islands"
    if [len(content) for content in contents] != [piece.view.nbytes for piece in pieces]:
        return "its state is of another length"
    if not all(map(_has_finite, pieces, contents)):
        return "its state is not finite"
    return None


def take_state(pieces: Sequence[Piece], contents: Sequence[bytes]) -> None:
    """Copy the bytes of each piece of another island into the piece here, once `find_mismatch` gave None."""
    for piece, content in zip(pieces, contents, strict=True):
        values = _values_of(piece, content)
        piece.view.detach().copy_(values.view(piece.view.shape))
        if piece.set_number is not None:
            piece.set_number(values.item())


def _has_finite(piece: Piece, content: bytes) -> bool:
    """Whether all numbers for a piece are finite; whole numbers always are."""
    return not piece.view.is_floating_point() or is_finite(_values_of(piece, content))


def _describe(piece: Piece) -> list[object]:
    """Give what must be equal on both islands, in the form in which JSON brings it back: lists, no tuples."""
    name, shape, *numbers = Segment.of(piece)
    return [name, piece.key, list(shape), *numbers, str(piece.view.dtype)]


def _bytes_of(piece: Piece) -> bytes:
    return piece.view.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _values_of(piece: Piece, content: bytes) -> torch.Tensor:
    """Give the numbers for a piece, of shape [elements], on the CPU."""
    dtype = piece.view.dtype
    if not content:
        # `frombuffer` refuses a buffer without bytes.
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype)
