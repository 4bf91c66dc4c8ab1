"""The outer optimizer of islands: SGD with Nesterov momentum on the mean of what they have changed (DiLoCo).

DiLoCo: Douillard et al. 2023 (arXiv:2311.08105). With the rate 1 and without momentum it averages weights (local SGD).
Its state is in the memory of the host.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from hfdist.checkpoint.piece import OPTIONAL, Piece
from hfdist.islands.owned_pieces import OwnedPieces, join, share_out, to_host

OUTER_WEIGHT, OUTER_MOMENTUM, OUTER_STEP = (f"{OPTIONAL}outer_{name}" for name in ("weight", "momentum", "step"))
"""Keys of pieces: weights and momentum behind the last round, and the step at which it ended."""
_NEVER = -1


@dataclass(frozen=True)
class _Outer:
    """The outer state of one piece."""

    weight: torch.Tensor
    """Float32, flat, on the CPU."""
    momentum: torch.Tensor


class OuterOptimizer:
    """Keeps the outer weights, and moves them. All ranks of an island make it together.

    Args:
        list_pieces: gives the pieces of this rank's engine, anew each time.
        lr: of the outer step.
        momentum: Nesterov's; 0: none is kept.
        fragments: parts that are exchanged one after another.
        mix: what stays of the own weights behind an exchange.
    """

    def __init__(
        self,
        list_pieces: Callable[[], Iterable[Piece]],
        *,
        lr: float,
        momentum: float,
        fragments: int = 1,
        mix: float = 0.0,
    ) -> None:
        self._owned = OwnedPieces(list_pieces)
        self._lr, self._momentum, self._mix = lr, momentum, mix
        sizes = [piece.view.numel() for piece in self._owned.held()]
        self._fragment = share_out(sizes, fragments)
        """Of each piece that this rank holds."""
        self._own_fragment = [part for part, is_own in zip(self._fragment, self._owned.is_own, strict=True) if is_own]
        self._step = torch.full((1,), _NEVER)
        self._outer = [
            _Outer(torch.zeros(size), torch.zeros(size if momentum > 0 else 0))
            for size in (piece.view.numel() for piece in self._owned.own())
        ]
        self._digest: str | None = None

    @property
    def layout(self) -> str:
        """Equal for ranks that hold the same pieces."""
        return self._owned.layout

    @property
    def step(self) -> int:
        """At which the last round ended."""
        return int(self._step)

    def begin(self, step: int) -> None:
        """Begin at the present weights, unless a checkpoint has brought outer state."""
        self._digest = None
        if self._step == _NEVER:
            self._step.fill_(step)
            for outer, piece in zip(self._outer, self._owned.own(), strict=True):
                outer.weight.copy_(to_host(piece.view))

    def digest(self) -> str:
        """Give a hash of the outer state of this rank."""
        if self._digest is None:
            found = hashlib.blake2b(digest_size=16)
            for outer in self._outer:
                found.update(outer.weight.numpy().data)
                found.update(outer.momentum.numpy().data)
            self._digest = found.hexdigest()
        return self._digest

    def after_load(self) -> None:
        """Take note that pieces have other values."""
        self._digest = None

    def pieces(self) -> Iterator[Piece]:
        """List the outer state for a checkpoint."""
        for outer, piece in zip(self._outer, self._owned.own(), strict=True):
            yield replace(piece, key=OUTER_WEIGHT, view=outer.weight, set_number=None)
            if self._momentum > 0:
                yield replace(piece, key=OUTER_MOMENTUM, view=outer.momentum, set_number=None)
        yield Piece(name=self._owned.first_name, key=OUTER_STEP, shape=(1,), start=0, view=self._step)

    def changes(self, fragment: int | None) -> torch.Tensor:
        """Give how far the weights of a fragment, or all, are from the outer ones: float32 of shape [n]."""
        held = zip(self._outer, self._owned.own(), self._own_fragment, strict=True)
        # A weight of less precision began at the rounded outer one.
        return join(
            outer.weight.to(piece.view.dtype).float() - to_host(piece.view)
            for outer, piece, part in held
            if fragment in (None, part)
        )

    def take(self, mean: torch.Tensor, step: int, fragment: int | None) -> None:
        """Move the outer weights of a fragment, or all, by the mean change of all islands, and the own ones to them.

        A collective of this island. `engine.after_load` must follow.

        Args:
            mean: of `changes` of all islands.
            step: behind which these were.
            fragment: of `changes`.
        """
        moved = [outer for outer, part in zip(self._outer, self._own_fragment, strict=True) if fragment in (None, part)]
        changes = mean.split([len(outer.weight) for outer in moved]) if moved else ()
        for outer, change in zip(moved, changes, strict=True):
            if self._momentum > 0:
                outer.momentum.mul_(self._momentum).add_(change)
                change = change + self._momentum * outer.momentum
            outer.weight.sub_(change, alpha=self._lr)
        self._step.fill_(step)
        self._digest = None
        among = [fragment in (None, part) for part in self._fragment]
        # All of it behind the last exchange of a run.
        mix = 0.0 if fragment is None else self._mix
        self._owned.spread([outer.weight for outer in moved], among=among, mix=mix)


def is_finite(vector: torch.Tensor) -> bool:
    """Whether all of its numbers are finite."""
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())
