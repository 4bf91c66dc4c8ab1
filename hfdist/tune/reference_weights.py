"""The trained weights as a run begins with them, on the CPU, and put into the model while it is compared with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece
from hfdist.strategies.engine import Engine

_HALF = (torch.bfloat16, torch.float16)
"""Types of which there may be copies in float32."""


class ReferenceWeights:
    """This rank's part of the trained weights, as they are when this is made. Each call is a collective.

    Args:
        engine: an engine that has its optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept = [piece.view.to("cpu", copy=True) for piece in self._pieces()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the model's weights for these in the block, and back after it, bit by bit. Nothing is gathered."""
        self._exchange()
        yield
        # What fails in between ends the run on all ranks: no rank may wait here for the others.
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for piece, kept in zip(self._pieces(), self._kept, strict=True):
            present = piece.view.clone()
            piece.view.copy_(kept)
            kept.copy_(present)
        self._engine.after_load()

    def _pieces(self) -> list[Piece]:
        """List the trained weights. Where weights of half precision have float32 copies, list the copies alone.

        `after_load` makes the others from them.
        """
        trained = {name for name, parameter in self._engine.model.named_parameters() if parameter.requires_grad}
        pieces = [p for p in self._engine.pieces() if p.name in trained and p.key in (WEIGHT, MASTER)]
        has_copies = any(piece.key == MASTER for piece in pieces)
        return [p for p in pieces if p.key == MASTER or not (has_copies and p.view.dtype in _HALF)]
