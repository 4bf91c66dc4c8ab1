"""The outer optimizer of islands: once a round it moves the weights by the mean of the islands' changes.

    change = weights after the last round (outer weights) - weights now         on each island
    outer weights -= rate * direction(mean of all changes)                      alike on all islands

SGD with Nesterov momentum: DiLoCo (Douillard et al. 2023, arXiv:2311.08105). With the rate 1 and without momentum it
averages weights (local SGD, FedAvg). Adam without correction of the bias: FedAdam (Reddi et al., arXiv:2003.00295).
Its state is in the host's memory.
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
"""Key of the momentum of the mean changes."""
OUTER_SQUARE = f"{OPTIONAL}outer_square"
"""Key of the mean of the squared mean changes."""
OUTER_STEP = f"{OPTIONAL}outer_step"
"""Key of the step at which the last round ended."""
_NEVER = -1
"""The outer step where no round has begun."""


@dataclass(frozen=True)
class _Outer:
    """The outer state of one owned piece: float32 tensors on the CPU, of shape [elements]."""

    weight: torch.Tensor
    momentum: torch.Tensor
    """The momentum; without elements where the rule has none."""
    square: torch.Tensor
    """The mean of squares; without elements where the rule has none."""


class OuterOptimizer:
    """The outer weights of the pieces that this rank owns, and the rule that moves them.

    All ranks of an island make it together. The pieces are dealt to `islands.fragments` fragments, so that a streaming
    run can exchange one fragment at a time.

    Args:
        list_pieces: lists the pieces of this rank's engine, anew at each call.
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
        """Step at which the last round ended; a tensor, as a checkpoint reads into it."""
        self._outer = [self._zeros(piece.view.numel()) for piece in self.owned.own()]
        """Outer state of each piece that this rank owns."""
        self._digest: str | None = None
        """Digest of the outer state; None: it has changed since it was computed last."""

    def _zeros(self, size: int) -> _Outer:
        momentum_size = size if self._has_momentum else 0
        square_size = size if self._has_square else 0
        return _Outer(torch.zeros(size), torch.zeros(momentum_size), torch.zeros(square_size))

    @property
    def layout(self) -> str:
        """A digest that is equal for ranks that hold the same pieces."""
        return self.owned.layout

    @property
    def step(self) -> int:
        """Step at which the last round ended."""
        return int(self._step)

    def begin(self, step: int) -> None:
        """Take the present weights as the outer ones, unless a checkpoint has brought outer state.

        Args:
            step: the step at which the training begins.
        """
        self._digest = None
        if self._step == _NEVER:
            self._step.fill_(step)
            for outer, piece in zip(self._outer, self.owned.own(), strict=True):
                outer.weight.copy_(to_cpu_vector(piece.view))

    def digest(self) -> str:
        """Give a digest of the outer state of this rank, as text."""
        if self._digest is None:
            computed = hashlib.blake2b(digest_size=16)
            for outer in self._outer:
                computed.update(outer.weight.numpy().data)
                computed.update(outer.momentum.numpy().data)
                computed.update(outer.square.numpy().data)
            self._digest = computed.hexdigest()
        return self._digest

    def after_load(self) -> None:
        """Forget the digest, once others have written into the outer state."""
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
        """Give how far the owned weights of a fragment have moved since the last round.

        Args:
            fragment: number of the fragment; None: all fragments.

        Returns:
            Outer weights minus present weights, float32 on the CPU, of shape [owned elements].
        """
        # A weight of less precision began at the rounded outer one.
        return join_vectors(
            outer.weight.to(piece.view.dtype).float() - to_cpu_vector(piece.view)
            for outer, piece, number in zip(self._outer, self.owned.own(), self._own_fragments, strict=True)
            if fragment in (None, number)
        )

    def take(self, mean: torch.Tensor, step: int, fragment: int | None) -> None:
        """Move the outer weights of a fragment by the mean change, and set the model's weights to them.

        A collective of this island. `engine.after_load` must follow.

        Args:
            mean: mean, over all islands, of what `changes` has given.
            step: the step after which these changes were computed.
            fragment: the fragment for which `changes` was called; None: all fragments.
        """
        moved = [
            outer for outer, number in zip(self._outer, self._own_fragments, strict=True) if fragment in (None, number)
        ]
        # Raises where the mean has another length than the pieces together.
        changes = mean.split([len(outer.weight) for outer in moved])
        for outer, change in zip(moved, changes, strict=True):
            outer.weight.sub_(self._direction(outer, change), alpha=self._config.outer_lr)
        self._step.fill_(step)
        self._digest = None
        changes_held = [fragment in (None, number) for number in self._fragments]
        # After the last exchange of a run no share of the island's own weights stays.
        mix = 0.0 if fragment is None else self._config.mix
        self.owned.spread([outer.weight for outer in moved], among=changes_held, mix=mix)

    def _direction(self, outer: _Outer, change: torch.Tensor) -> torch.Tensor:
        """Update the momentum of a piece, and give the direction of its step, of the shape of `change`."""
        config, momentum = self._config, self._config.outer_momentum
        if self._has_square:
            outer.momentum.lerp_(change, 1 - momentum)
            outer.square.mul_(config.outer_beta2).addcmul_(change, change, value=1 - config.outer_beta2)
            return outer.momentum / (outer.square.sqrt() + config.outer_eps)
        if self._has_momentum:
            outer.momentum.mul_(momentum).add_(change)
            return change + momentum * outer.momentum
        return change
