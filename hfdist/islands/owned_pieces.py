"""Which rank of an island exchanges which pieces with other islands: each piece has one owner among its holders.

    ranks 0, 1 (ddp)    both hold a, b, c:   rank 0 owns a, rank 1 owns b and c
    exchange            each owner gets new values of its pieces from other islands
    spread              each owner broadcasts them to the ranks that hold the same pieces

Only the pieces of an engine are used, so that the layout need not be known.
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
    """The pieces that the optimizer steps on this rank, each with its owner.

    All ranks of an island make it together.

    Args:
        list_pieces: lists the pieces of this rank's engine, anew at each call.
    """

    def __init__(self, list_pieces: Callable[[], Iterable[Piece]]) -> None:
        self._list_pieces = list_pieces
        self._copied = _find_copied(list_pieces())
        """Names of the parameters that are stepped as float32 copies."""
        held = self.held()
        self.layout = digest_of([[piece.key, Segment.of(piece)] for piece in held])
        """A digest that is equal for ranks that hold the same pieces."""
        names = gather_json(min((piece.name for piece in held), default=None))
        self.first_name = min(name for name in names if name is not None)
        """The smallest name of a piece on any rank, in the order of text."""
        layouts: list[str] = gather_json(self.layout)
        holders = [number for number, layout in enumerate(layouts) if layout == self.layout]
        self._group = _group_of(layouts)
        self._number = holders.index(rank())
        """Number of this rank among those that hold the same pieces."""
        self._owners = share_out([piece.view.numel() for piece in held], len(holders))
        """Owner of each held piece: its number among the ranks that hold the same pieces."""
        self.is_own = [owner == self._number for owner in self._owners]
        """Whether this rank owns a held piece, for each one."""

    def held(self) -> list[Piece]:
        """List the pieces that the optimizer steps on this rank: trained weights, or their float32 copies."""
        pieces = list(self._list_pieces())
        # A parameter is trained if the optimizer has a number for it, such as that of its steps.
        trained = {piece.name for piece in pieces if is_number(piece.key)}
        return [
            piece
            for piece in pieces
            if piece.view.numel() > 0
            and piece.name in trained
            and piece.key == (MASTER if piece.name in self._copied else WEIGHT)
        ]

    def own(self) -> list[Piece]:
        """List the held pieces that this rank owns."""
        return [piece for piece, is_own in zip(self.held(), self.is_own, strict=True) if is_own]

    def own_state(self, key: str) -> list[Piece]:
        """List one tensor of the engine's optimizer, such as `exp_avg`, for each owned piece."""
        states = {Segment.of(piece): piece for piece in self._list_pieces() if piece.key == key}
        return [states[Segment.of(piece)] for piece in self.own()]

    @torch.no_grad()
    def spread(self, values: Sequence[torch.Tensor], *, among: Sequence[bool] | None = None, mix: float = 0.0) -> None:
        """Set the held pieces of all ranks to the values of their owners. A collective.

        `engine.after_load` must follow.

        Args:
            values: new values of each owned piece that changes, float32 on the CPU.
            among: whether a held piece changes, for each one; None: all change.
            mix: share of the present weights that stays.
        """
        changes = [True] * len(self._owners) if among is None else among
        pieces = list(zip(self.held(), self._owners, changes, strict=True))
        num_owners = 1 if self._group is None else dist.get_world_size(self._group)
        for number in range(num_owners):
            changed = [piece for piece, owner, is_changed in pieces if owner == number and is_changed]
            if not changed:
                continue
            sizes = [piece.view.numel() for piece in changed]
            joined = join_vectors(values) if number == self._number else torch.empty(sum(sizes))
            if self._group is not None:
                joined = joined.to(device_of(self._group))
                dist.broadcast(joined, group=self._group, group_src=number)
            for piece, value in zip(changed, joined.split(sizes), strict=True):
                view = piece.view.detach()
                new = value.view(view.shape)
                if mix > 0:
                    new = mix * view.float() + (1 - mix) * new.to(view.device)
                view.copy_(new)


def _find_copied(pieces: Iterable[Piece]) -> set[str]:
    """Name the parameters that the optimizer steps as float32 copies, on whichever ranks these are. A collective."""
    names_here = sorted({piece.name for piece in pieces if piece.key == MASTER})
    return {name for names in gather_json(names_here) for name in names}


def _group_of(layouts: list[str]) -> dist.ProcessGroup | None:
    """Give the group of the ranks that hold the same pieces; None: only this rank does. A collective.

    Args:
        layouts: digest of the held pieces of each rank, in order of rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for number, layout in enumerate(layouts):
        ranks_of.setdefault(layout, []).append(number)
    own_group = None
    # All ranks make all groups, as torch asks for.
    for ranks in ranks_of.values():
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            if rank() in ranks:
                own_group = group
    return own_group


def share_out(sizes: list[int], num_owners: int) -> list[int]:
    """Share pieces out to owners so that all have about as many elements.

    Args:
        sizes: number of elements of each piece.
        num_owners: number of owners.

    Returns:
        The number of the owner of each piece.
    """
    loads, owners = [0] * num_owners, [0] * len(sizes)
    # The largest piece first, each to the owner that has least so far.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners
