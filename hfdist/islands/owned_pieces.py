"""Which rank of an island exchanges what: ranks that hold the same pieces share them out, and give them to each other.

It works on the pieces of an engine, so that it knows no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece, is_number
from hfdist.collectives import device_of, gather_json, rank
from hfdist.data.cache import digest_of

Place = tuple[str, tuple[int, ...], int, int, int, int]
"""Place of a piece: name, shape of the whole tensor, start, run, pitch, elements."""


class OwnedPieces:
    """What the optimizer of an island steps, and this rank exchanges. All ranks of an island make it together.

    Args:
        list_pieces: gives the pieces of this rank's engine, anew each time.
    """

    def __init__(self, list_pieces: Callable[[], Iterable[Piece]]) -> None:
        self._list_pieces = list_pieces
        self._copied = _copied(list_pieces())
        held = self.held()
        self.layout = digest_of([[piece.key, place_of(piece)] for piece in held])
        """Digest that is equal for ranks that hold the same pieces."""
        told = gather_json([self.layout, min((piece.name for piece in held), default=None)])
        self.first_name = min(name for _, name in told if name is not None)
        """The smallest name of a piece on any rank, in the order of text."""
        alike = [place for place, (layout, _) in enumerate(told) if layout == told[rank()][0]]
        self._group = _group_of([layout for layout, _ in told])
        self._place = alike.index(rank())
        self._owner = share_out([piece.view.numel() for piece in held], len(alike))
        """Owner of each piece that this rank holds: its number among the ranks that hold the same pieces."""
        self.is_own = [owner == self._place for owner in self._owner]
        """Whether this rank owns each of `held`."""

    def held(self) -> list[Piece]:
        """List what the optimizer steps on this rank: weights that are trained, or their float32 copies."""
        pieces = list(self._list_pieces())
        trained = {piece.name for piece in pieces if is_number(piece.key)}
        return [
            piece
            for piece in pieces
            if piece.view.numel() > 0
            and piece.name in trained
            and piece.key == (MASTER if piece.name in self._copied else WEIGHT)
        ]

    def own(self) -> list[Piece]:
        """List what this rank exchanges."""
        return [piece for piece, is_own in zip(self.held(), self.is_own, strict=True) if is_own]

    def own_state(self, key: str) -> list[Piece]:
        """List what the engine's optimizer keeps of it under a key."""
        found = {place_of(piece): piece for piece in self._list_pieces() if piece.key == key}
        return [found[place_of(piece)] for piece in self.own()]

    @torch.no_grad()
    def spread(self, values: Sequence[torch.Tensor], *, among: Sequence[bool] | None = None, mix: float = 0.0) -> None:
        """Move what all ranks hold to what its owners have. A collective; `engine.after_load` must follow.

        Args:
            values: float32 on the CPU, one for each of `own`, or of those that move.
            among: which of `held` move; None: all.
            mix: share of the present weights that stays.
        """
        moves = [True] * len(self._owner) if among is None else among
        pieces = list(zip(self.held(), self._owner, moves, strict=True))
        for owner in range(1 if self._group is None else dist.get_world_size(self._group)):
            moved = [piece for piece, place, is_moved in pieces if place == owner and is_moved]
            if not moved:
                continue
            sizes = [piece.view.numel() for piece in moved]
            joined = join(values) if owner == self._place else torch.empty(sum(sizes))
            if self._group is not None:
                joined = joined.to(device_of(self._group))
                dist.broadcast(joined, group=self._group, group_src=owner)
            for piece, value in zip(moved, joined.split(sizes), strict=True):
                view, new = piece.view.detach(), value.view(piece.view.shape)
                view.copy_(new if mix == 0 else mix * view.float() + (1 - mix) * new.to(view.device))


def place_of(piece: Piece) -> Place:
    """Give which elements of which tensor a piece holds."""
    return piece.name, piece.shape, piece.start, piece.run, piece.pitch, piece.view.numel()


def to_host(view: torch.Tensor) -> torch.Tensor:
    """Give a copy in float32 on the CPU, flat."""
    return view.detach().reshape(-1).float().cpu()


def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Give one tensor of all elements; there may be none."""
    return torch.cat([torch.empty(0), *tensors])


def _copied(pieces: Iterable[Piece]) -> set[str]:
    """Name the parameters of which some rank steps a float32 copy; others may hold their weights. A collective."""
    own = sorted({piece.name for piece in pieces if piece.key == MASTER})
    return {name for names in gather_json(own) for name in names}


def _group_of(layouts: list[str]) -> dist.ProcessGroup | None:
    """Give the group of the ranks that hold the same pieces; None: this one alone. A collective."""
    found = None
    for layout in dict.fromkeys(layouts):
        ranks = [place for place, other in enumerate(layouts) if other == layout]
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
