"""FedProx (Li et al. 2020, arXiv:1812.06127): weights are held to those with which the round has begun.

It is decoupled from the gradients, as AdamW's weight decay is, so that it is the same with each optimizer and layout.
"""

from __future__ import annotations

import torch

from hfdist.islands.owned_pieces import OwnedPieces


class ProximalTerm:
    """Holds the weights of this rank.

    Args:
        owned: has the pieces of this rank's engine.
        strength: factor of the term; with the rate it gives the share of the way back that each step goes.
    """

    def __init__(self, owned: OwnedPieces, strength: float) -> None:
        self._owned, self._strength = owned, strength
        self._anchors: list[torch.Tensor] = []

    def begin_round(self) -> None:
        """Hold to the present weights."""
        self._anchors = [piece.view.detach().clone() for piece in self._owned.held()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move the weights after a step of this learning rate. `engine.after_load` must follow."""
        for piece, anchor in zip(self._owned.held(), self._anchors, strict=True):
            piece.view.lerp_(anchor, min(1.0, lr * self._strength))
