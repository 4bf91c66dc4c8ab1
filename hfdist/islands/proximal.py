"""FedProx (Li et al. 2020, arXiv:1812.06127): each step pulls the weights back to those at the begin of the round.

The pull is decoupled from the gradients, as AdamW's weight decay is, so that it is the same with each optimizer and
layout.
"""

from __future__ import annotations

import torch

from hfdist.islands.owned_pieces import OwnedPieces


class ProximalTerm:
    """The pull on the weights that this rank holds.

    Args:
        owned: the trained pieces of this rank's engine.
        strength: factor of the pull: a step goes back by the share `lr * strength` of the way, at most by all of it.
    """

    def __init__(self, owned: OwnedPieces, strength: float) -> None:
        self._owned, self._strength = owned, strength
        self._anchors: list[torch.Tensor] = []
        """Weights of each held piece at the begin of the round."""

    def begin_round(self) -> None:
        """Take the present weights as those to which later steps are pulled."""
        self._anchors = [piece.view.detach().clone() for piece in self._owned.held()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Pull the weights back after an optimizer's step of this learning rate. `engine.after_load` must follow."""
        for piece, anchor in zip(self._owned.held(), self._anchors, strict=True):
            piece.view.lerp_(anchor, min(1.0, lr * self._strength))
