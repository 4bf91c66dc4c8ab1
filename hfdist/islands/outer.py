"""The outer optimizer of islands: a step along the mean of what they have changed; its state is in the host's memory.

SGD with Nesterov momentum: DiLoCo (Douillard et al. 2023, arXiv:2311.08105). With the rate 1 and without momentum it
averages weights (local SGD, FedAvg). Adam without correction of the bias: FedAdam (Reddi et al., arXiv:2003.00295).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from hfdist.checkpoint.piece import OPTIONAL, Piece
from hfdist.config.islands import IslandsConfig, OuterRule
from hfdist.islands.owned_pieces import OwnedPieces, share_out
from hfdist.islands.vectors import join_vectors, to_cpu_vector

OUTER_WEIGHT = f"{OPTIONAL}outer_weight"
"""Key of the weights as they were after the last round."""
OUTER_MOMENTUM = f"{OPTIONAL}outer_momentum"
OUTER_SQUARE = f"{OPTIONAL}outer_square"
"""Key of the mean of squares."""
OUTER_STEP = f"{OPTIONAL}outer_step"
"""Key of the step at which the last round ended."""
_NEVER = -1
"""The outer step where no round has begun."""


@dataclass(frozen=True)
class _Outer:
    """The outer state of one piece."""

    weight: torch.Tensor
    """Float32, flat, on the CPU."""
    momentum: torch.Tensor
    """As `weight`; empty where the rule has none, as `square` is."""
    square: torch.Tensor


class OuterOptimizer:
    """Keeps the outer weights, and moves them. All ranks of an island make it together.

    Args:
        list_pieces: gives the pieces of this rank's engine, anew each time.
        config: `islands.*`.
    """

    def __init__(self, list_pieces: Callable[[], Iterable[Piece]], config: IslandsConfig) -> None:
        self._config, self.owned = config, OwnedPieces(list_pieces)
        self._has_square = config.outer_optimizer is OuterRule.adam
        self._has_momentum = config.outer_momentum > 0 or self._has_square
        sizes = [piece.view.numel() for piece in self.owned.held()]
        self._fragments = share_out(sizes, config.fragments)
        """Number of the fragment of each piece that this rank holds."""
        self._own_fragments = [
            number for number, is_own in zip(self._fragments, self.owned.is_own, strict=True) if is_own
        ]
        """Number of the fragment of each piece that this rank owns."""
        self._step = torch.full((1,), _NEVER)
        self._outer = [
            _Outer(
                torch.zeros(size),
                torch.zeros(size if self._has_momentum else 0),
                torch.zeros(size if self._has_square else 0),
            )
            for size in (piece.view.numel() for piece in self.owned.own())
        ]
        self._digest: str | None = None

    @property
    def layout(self) -> str:
        """The layout of the owned pieces."""
        return self.owned.layout

    @property
    def step(self) -> int:
        """Step at which the last round ended."""
        return int(self._step)

    def begin(self, step: int) -> None:
        """Begin at the present weights, unless a checkpoint has brought outer state."""
        self._digest = None
        if self._step == _NEVER:
            self._step.fill_(step)
            for outer, piece in zip(self._outer, self.owned.own(), strict=True):
                outer.weight.copy_(to_cpu_vector(piece.view))

    def digest(self) -> str:
        """Give a hash of the outer state of this rank."""
        if self._digest is None:
            found = hashlib.blake2b(digest_size=16)
            for outer in self._outer:
                found.update(outer.weight.numpy().data)
                found.update(outer.momentum.numpy().data)
                found.update(outer.square.numpy().data)
            self._digest = found.hexdigest()
        return self._digest

    def after_load(self) -> None:
        """Take note that pieces have other values."""
        self._digest = None

    def pieces(self) -> Iterator[Piece]:
        """List the outer state for a checkpoint."""
        for outer, piece in zip(self._outer, self.owned.own(), strict=True):
            yield replace(piece, key=OUTER_WEIGHT, view=outer.weight, set_number=None)
            if self._has_momentum:
                yield replace(piece, key=OUTER_MOMENTUM, view=outer.momentum, set_number=None)
            if self._has_square:
                yield replace(piece, key=OUTER_SQUARE, view=outer.square, set_number=None)
        yield Piece(name=self.owned.first_name, key=OUTER_STEP, shape=(1,), start=0, view=self._step)

    def changes(self, fragment: int | None) -> torch.Tensor:
        """Give how far the weights of a fragment, or all, are from the outer ones: float32 of shape [n]."""
        # A weight of less precision began at the rounded outer one.
        return join_vectors(
            outer.weight.to(piece.view.dtype).float() - to_cpu_vector(piece.view)
            for outer, piece, number in zip(self._outer, self.owned.own(), self._own_fragments, strict=True)
            if fragment in (None, number)
        )

    def take(self, mean: torch.Tensor, step: int, fragment: int | None) -> None:
        """Move the outer weights of a fragment, or all, by the mean change of all islands, and the own ones to them.

        A collective of this island. `engine.after_load` must follow.

        Args:
            mean: of `changes` of all islands.
            step: the step after which these changes were computed.
            fragment: of `changes`.
        """
        moved = [
            outer for outer, number in zip(self._outer, self._own_fragments, strict=True) if fragment in (None, number)
        ]
        changes = mean.split([len(outer.weight) for outer in moved]) if moved else ()
        for outer, change in zip(moved, changes, strict=True):
            outer.weight.sub_(self._direction(outer, change), alpha=self._config.outer_lr)
        self._step.fill_(step)
        self._digest = None
        among = [fragment in (None, number) for number in self._fragments]
        # After the last exchange of a run no share of the island's own weights stays.
        mix = 0.0 if fragment is None else self._config.mix
        self.owned.spread([outer.weight for outer in moved], among=among, mix=mix)

    def _direction(self, outer: _Outer, change: torch.Tensor) -> torch.Tensor:
        config, momentum = self._config, self._config.outer_momentum
        if self._has_square:
            outer.momentum.lerp_(change, 1 - momentum)
            outer.square.mul_(config.outer_beta2).addcmul_(change, change, value=1 - config.outer_beta2)
            return outer.momentum / (outer.square.sqrt() + config.outer_eps)
        if self._has_momentum:
            outer.momentum.mul_(momentum).add_(change)
            return change + momentum * outer.momentum
        return change
