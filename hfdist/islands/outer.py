"""The outer optimizer of islands: SGD with Nesterov momentum on the mean of what they have changed (DiLoCo).

DiLoCo: Douillard et al. 2023 (arXiv:2311.08105). With the rate 1 and without momentum it averages weights (local SGD).
It works on the pieces of an engine, so that it knows no layout. Ranks of an island that hold the same pieces share them
out: each keeps the outer state of some in the memory of its host, exchanges these, and gives them to the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hfdist.checkpoint.piece import MASTER, OPTIONAL, WEIGHT, Piece, is_number
from hfdist.collectives import device_of, gather_json, rank

OUTER_WEIGHT, OUTER_MOMENTUM, OUTER_STEP = (f"{OPTIONAL}outer_{name}" for name in ("weight", "momentum", "step"))
"""Keys of pieces: weights and momentum behind the last round, and the step at which it ended."""
_NEVER = -1


@dataclass(frozen=True)
class _Owned:
    """The outer state of one piece."""

    piece: Piece
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
        self._list_pieces, self._lr, self._momentum, self._mix = list_pieces, lr, momentum, mix
        self._copied = _copied(list_pieces())
        pieces = self._stepped()
        shapes = [[p.name, p.key, p.shape, p.start, p.run, p.pitch, p.view.numel()] for p in pieces]
        self.layout = _digest(f"{shapes}".encode())
        """Equal for ranks that hold the same pieces."""
        told = gather_json([self.layout, min((p.name for p in pieces), default=None)])
        self._first_name = min(name for _, name in told if name is not None)
        alike = [place for place, (digest, _) in enumerate(told) if digest == told[rank()][0]]
        self._group = _group_of([digest for digest, _ in told])
        sizes = [piece.view.numel() for piece in pieces]
        self._owner = share_out(sizes, len(alike))
        """Of each piece, its number among the ranks that hold the same."""
        self._fragment = share_out(sizes, fragments)
        """Of each piece."""
        self._place = alike.index(rank())
        self._step = torch.full((1,), _NEVER)
        self._owned = [
            _Owned(
                piece,
                torch.zeros(piece.view.numel()),
                torch.zeros(piece.view.numel() if momentum > 0 else 0),
            )
            for piece, owner in zip(pieces, self._owner, strict=True)
            if owner == self._place
        ]
        self._own_fragment = [f for f, owner in zip(self._fragment, self._owner, strict=True) if owner == self._place]

    def _stepped(self) -> list[Piece]:
        """What the optimizer steps: weights that are trained, or their float32 copies."""
        pieces = list(self._list_pieces())
        trained = {piece.name for piece in pieces if is_number(piece.key)}
        return [
            piece
            for piece in pieces
            if piece.view.numel() > 0
            and piece.name in trained
            and piece.key == (MASTER if piece.name in self._copied else WEIGHT)
        ]

    @property
    def step(self) -> int:
        """At which the last round ended."""
        return int(self._step)

    def begin(self, step: int) -> None:
        """Begin at the present weights, unless a checkpoint has brought outer state."""
        if self._step == _NEVER:
            self._step.fill_(step)
            for one, view in self._views():
                one.weight.copy_(_to_host(view))

    def digest(self) -> str:
        """Give a hash of the outer state of this rank."""
        found = hashlib.blake2b(digest_size=16)
        for one in self._owned:
            found.update(one.weight.numpy().data)
            found.update(one.momentum.numpy().data)
        return found.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """List the outer state for a checkpoint."""
        for one in self._owned:
            yield replace(one.piece, key=OUTER_WEIGHT, view=one.weight, set_number=None)
            if self._momentum > 0:
                yield replace(one.piece, key=OUTER_MOMENTUM, view=one.momentum, set_number=None)
        yield Piece(name=self._first_name, key=OUTER_STEP, shape=(1,), start=0, view=self._step)

    def changes(self, fragment: int | None) -> torch.Tensor:
        """Give how far the weights of a fragment, or all, are from the outer ones: float32 of shape [n]."""
        views = [pair for pair, own in zip(self._views(), self._own_fragment, strict=True) if fragment in (None, own)]
        # A weight of less precision began at the rounded outer one.
        return _joined(one.weight.to(view.dtype).float() - _to_host(view) for one, view in views)

    def take(self, mean: torch.Tensor, step: int, fragment: int | None) -> None:
        """Move the outer weights of a fragment, or all, by the mean change of all islands, and the own ones to them.

        A collective of this island. `engine.after_load` must follow.

        Args:
            mean: of `changes` of all islands.
            step: behind which these were.
            fragment: of `changes`.
        """
        moved = [one for one, own in zip(self._owned, self._own_fragment, strict=True) if fragment in (None, own)]
        for one, change in zip(moved, mean.split([len(one.weight) for one in moved]) if moved else (), strict=True):
            if self._momentum > 0:
                one.momentum.mul_(self._momentum).add_(change)
                change = change + self._momentum * one.momentum
            one.weight.sub_(change, alpha=self._lr)
        self._step.fill_(step)
        self._spread(fragment, moved)

    @torch.no_grad()
    def _spread(self, fragment: int | None, moved: list[_Owned]) -> None:
        """Move the weights of all ranks that hold what has moved."""
        pieces = list(zip(self._stepped(), self._owner, self._fragment, strict=True))
        # All of it behind the last exchange of a run.
        mix = 0.0 if fragment is None else self._mix
        for owner in range(1 if self._group is None else dist.get_world_size(self._group)):
            own = [piece for piece, place, part in pieces if place == owner and fragment in (None, part)]
            if not own:
                continue
            values = torch.empty(sum(piece.view.numel() for piece in own))
            if owner == self._place:
                values = _joined(one.weight for one in moved)
            if self._group is not None:
                values = values.to(device_of(self._group))
                dist.broadcast(values, group=self._group, group_src=owner)
            for piece, value in zip(own, values.split([piece.view.numel() for piece in own]), strict=True):
                view, outer = piece.view.detach(), value.view(piece.view.shape)
                view.copy_(outer if mix == 0 else mix * view.float() + (1 - mix) * outer.to(view.device))

    def _views(self) -> list[tuple[_Owned, torch.Tensor]]:
        pieces = [p for p, owner in zip(self._stepped(), self._owner, strict=True) if owner == self._place]
        return [(one, piece.view.detach()) for one, piece in zip(self._owned, pieces, strict=True)]


def _copied(pieces: Iterable[Piece]) -> set[str]:
    """Name the parameters of which some rank steps a float32 copy; others may hold their weights. A collective."""
    own = sorted({piece.name for piece in pieces if piece.key == MASTER})
    return {name for names in gather_json(own) for name in names}


def _to_host(view: torch.Tensor) -> torch.Tensor:
    return view.reshape(-1).float().cpu()


def _joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *tensors])


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _group_of(digests: list[str]) -> dist.ProcessGroup | None:
    """Give the group of the ranks that hold the same pieces; None: this one alone. A collective."""
    found = None
    for digest in dict.fromkeys(digests):
        ranks = [place for place, other in enumerate(digests) if other == digest]
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            found = group if rank() in ranks else found
    return found


def share_out(sizes: list[int], number: int) -> list[int]:
    """Give each of some pieces a number, the largest first and to whom has least."""
    loads, owners = [0] * number, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owner = loads.index(min(loads))
        owners[place] = owner
        loads[owner] += sizes[place]
    return owners


def is_finite(vector: torch.Tensor) -> bool:
    """Whether all of its numbers are finite."""
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())
