"""A segment: which elements of which parameter a rank holds, as islands and a parameter server tell each other."""

from __future__ import annotations

from typing import NamedTuple

from hfdist.checkpoint.piece import Piece


class Segment(NamedTuple):
    """Some elements of a parameter: one run, or equal runs at equal distances.

    A message has a segment as a list of its fields, in this order.
    """

    name: str
    """The parameter's name in the model."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element, counted in the flattened parameter."""
    run: int
    """Elements of each run; 0: all are one run."""
    pitch: int
    """Elements from the start of a run to that of the next; 0: there is one run."""
    num_elements: int
    """Elements of all runs together."""

    @classmethod
    def of(cls, piece: Piece) -> Segment:
        """Give the segment whose elements a piece holds."""
        return cls(piece.name, piece.shape, piece.start, piece.run, piece.pitch, piece.view.numel())
