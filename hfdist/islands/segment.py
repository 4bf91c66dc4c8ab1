"""Which elements of which parameter a rank exchanges, as islands and a parameter server tell each other."""

from __future__ import annotations

from typing import NamedTuple

from hfdist.checkpoint.piece import Piece


class Segment(NamedTuple):
    """Elements of a parameter; `start`, `run` and `pitch` are those of a `Piece`."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    run: int
    pitch: int
    num_elements: int

    @classmethod
    def of(cls, piece: Piece) -> Segment:
        """Give the elements that a piece holds."""
        return cls(piece.name, piece.shape, piece.start, piece.run, piece.pitch, piece.view.numel())
