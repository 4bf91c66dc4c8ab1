"""The weights that a run begins with: kept on the host, and put in the model's place where the reference is asked.

It needs no second model on a device, and works as the loading of a checkpoint does: in every layout, with an adapter or
with all weights trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece
from hfdist.strategies.base import Engine

_HALF = (torch.bfloat16, torch.float16)


class ReferenceWeights:
    """What this rank holds of the trained weights, as they are now. Each call is a collective.

    Args:
        engine: that has its optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept = [piece.view.to("cpu", copy=True) for piece in self._pieces()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have them meanwhile, and then its own ones again, bit by bit; no weights are gathered."""
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
        """List what is trained; of half precision with float32 copies these alone, from which `after_load` makes it."""
        trained = {name for name, parameter in self._engine.model.named_parameters() if parameter.requires_grad}
        pieces = [p for p in self._engine.pieces() if p.name in trained and p.key in (WEIGHT, MASTER)]
        has_copies = any(piece.key == MASTER for piece in pieces)
        return [p for p in pieces if p.key == MASTER or not (has_copies and p.view.dtype in _HALF)]
