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
from hfdist.islands.segment import Segment
from hfdist.islands.vectors import join_vectors


class OwnedPieces:
    """The pieces that the optimizer of an island steps, each with the rank that exchanges it: its owner.

    All ranks of an island make it together.

    Args:
        list_pieces: gives the pieces of this rank's engine, anew each time.
    """

    def __init__(self, list_pieces: Callable[[], Iterable[Piece]]) -> None:
        self._list_pieces = list_pieces
        self._copied = _find_copied(list_pieces())
        held = self.held()
        self.layout = digest_of([[piece.key, Segment.of(piece)] for piece in held])
        """Digest that is equal for ranks that hold the same pieces."""
        of_ranks = gather_json([self.layout, min((piece.name for piece in held), default=None)])
        self.first_name = min(name for _, name in of_ranks if name is not None)
        """The smallest name of a piece on any rank, in the order of text."""
        layouts = [layout for layout, _ in of_ranks]
        holders = [number for number, layout in enumerate(layouts) if layout == self.layout]
        self._group = _group_of(layouts)
        self._number = holders.index(rank())
        """Number of this rank among those that hold the same pieces."""
        self._owners = share_out([piece.view.numel() for piece in held], len(holders))
        """Owner of each of `held`: its number among the ranks that hold the same pieces."""
        self.is_own = [owner == self._number for owner in self._owners]
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
        """List those of `held` that this rank exchanges."""
        return [piece for piece, is_own in zip(self.held(), self.is_own, strict=True) if is_own]

    def own_state(self, key: str) -> list[Piece]:
        """List what the engine's optimizer keeps under a key, for each of `own`."""
        kept = {Segment.of(piece): piece for piece in self._list_pieces() if piece.key == key}
        return [kept[Segment.of(piece)] for piece in self.own()]

    @torch.no_grad()
    def spread(self, values: Sequence[torch.Tensor], *, among: Sequence[bool] | None = None, mix: float = 0.0) -> None:
        """Set what all ranks hold to the values of its owners. A collective; `engine.after_load` must follow.

        Args:
            values: float32 on the CPU, one for each of `own`, or of those that change.
            among: which of `held` change; None: all.
            mix: share of the present weights that stays.
        """
        changes = [True] * len(self._owners) if among is None else among
        pieces = list(zip(self.held(), self._owners, changes, strict=True))
        for number in range(1 if self._group is None else dist.get_world_size(self._group)):
            changed = [piece for piece, owner, is_changed in pieces if owner == number and is_changed]
            if not changed:
                continue
            sizes = [piece.view.numel() for piece in changed]
            joined = join_vectors(values) if number == self._number else torch.empty(sum(sizes))
            if self._group is not None:
                joined = joined.to(device_of(self._group))
                dist.broadcast(joined, group=self._group, group_src=number)
            for piece, value in zip(changed, joined.split(sizes), strict=True):
                view, new = piece.view.detach(), value.view(piece.view.shape)
                view.copy_(new if mix == 0 else mix * view.float() + (1 - mix) * new.to(view.device))


def _find_copied(pieces: Iterable[Piece]) -> set[str]:
    """Name the parameters of which some rank steps a float32 copy; others may hold their weights. A collective."""
    of_rank = sorted({piece.name for piece in pieces if piece.key == MASTER})
    return {name for names in gather_json(of_rank) for name in names}


def _group_of(layouts: list[str]) -> dist.ProcessGroup | None:
    """Give the group of the ranks that hold the same pieces; None: this one alone. A collective."""
    own_group = None
    # All ranks make all groups, as torch asks for.
    for layout in dict.fromkeys(layouts):
        ranks = [number for number, of_rank in enumerate(layouts) if of_rank == layout]
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            own_group = group if rank() in ranks else own_group
    return own_group


def share_out(sizes: list[int], num_owners: int) -> list[int]:
    """Give the number of the owner of each piece: the largest piece first, to the owner that has least so far."""
    loads, owners = [0] * num_owners, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners
