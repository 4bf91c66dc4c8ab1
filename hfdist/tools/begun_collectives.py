"""The collectives that ranks have begun, from their snapshots: who is in one, and who has not come to it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hfdist.watch.snapshot import Collective, Snapshot

_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")
"""Collectives to which all ranks of a group bring a tensor of the same size."""


class WaitingRanks(NamedTuple):
    """Ranks that wait for other ranks in a collective."""

    waiting: list[int]
    """Ranks that are in the collective."""
    awaited: list[int]
    """Ranks that have not come to it."""
    collective: str
    """The collective in words: its name, sizes and place."""


class BegunCollectives:
    """What all ranks have begun at one moment.

    Args:
        snapshots: snapshots that ranks have written themselves, by rank.
        ranks: all ranks of which anything is known.
        silent: ranks that neither write nor beat any more.
    """

    def __init__(self, snapshots: Mapping[int, Snapshot], ranks: Collection[int], silent: Collection[int]) -> None:
        self._snapshots, self._ranks, self._silent = snapshots, ranks, silent
        self._members: dict[str, list[int]] = {}
        """Ranks of each group, by its name with its ranks: groups of other ranks may have the same name."""
        self._pending: dict[int, list[Collective]] = {rank: [] for rank in snapshots}
        """Collectives that have not ended, by rank."""
        self._by_number: dict[tuple[str, int], dict[int, Collective]] = {}
        """What each rank has called under a number of a group, by group and number."""
        self._newest: dict[tuple[str, int], int] = {}
        """Number of the newest collective, by group and rank."""
        for rank, snapshot in snapshots.items():
            for collective in snapshot.collectives:
                ranks_of_group = snapshot.groups.get(collective.group, [])
                call = collective._replace(group=f"{collective.group} {ranks_of_group}")
                self._members[call.group] = ranks_of_group
                if not call.is_done:
                    self._pending[rank].append(call)
                if not call.is_p2p:
                    self._by_number.setdefault((call.group, call.number), {})[rank] = call
                    self._newest[call.group, rank] = max(call.number, self._newest.get((call.group, rank), 0))

    def pending(self, rank: int) -> Collective | None:
        """Give the collective in which a rank is; None: it is in none, or that is not known."""
        return next(iter(self._pending.get(rank, [])), None)

    def waits(self) -> list[WaitingRanks]:
        """Give the collectives that have not ended and to which some rank has not come, with those who wait there."""
        found: dict[tuple[str, int, str], WaitingRanks] = {}
        for rank in sorted(self._pending):
            call = self.pending(rank)
            if call is None:
                continue
            missing = [other for other in self._partners(rank, call) if not self._has_begun(other, call)]
            if missing:
                key = call.group, call.number, call.name if call.is_p2p else ""
                waiting = [*(found[key].waiting if key in found else []), rank]
                found[key] = WaitingRanks(waiting, missing, f"{short_name(call)}, {call.place}")
        return list(found.values())

    def first_differing(self) -> dict[int, Collective]:
        """Give the calls of all ranks at the first number of a group at which they differ, by rank; empty: nowhere.

        The calls of a group are numbered, and under one number all ranks should have called the same.
        """
        for _, calls in sorted(self._by_number.items()):
            if len(set(kinds_of(calls).values())) > 1:
                return calls
        return {}

    def without_end(self) -> dict[int, Collective]:
        """Give the calls of a collective in which all ranks of its group are, by rank; empty: there is none."""
        for group, members in self._members.items():
            calls: dict[int, Collective] = {}
            for rank in members:
                for call in self._pending.get(rank, []):
                    if call.group == group:
                        # Of several calls in a group, the rank is in the first one.
                        calls.setdefault(rank, call)
            if len(calls) > 1 and len(calls) == len(members):
                return calls
        return {}

    def _partners(self, rank: int, call: Collective) -> list[int]:
        """Give the other ranks of a call: those of its group, or the one at the other end of a message."""
        members = self._members[call.group]
        if call.is_p2p:
            # The name of a message is such as `nccl:recv 0<-1`, with ranks as the group numbers them.
            end = re.search(r"(?:->|<-)(\d+)$", call.name)
            if end is None or int(end[1]) >= len(members):
                return []
            members = [members[int(end[1])]]
        return [other for other in members if other != rank and other in self._ranks]

    def _has_begun(self, rank: int, call: Collective) -> bool:
        """Whether a rank has begun this call of its group, too, as far as is known."""
        if rank not in self._snapshots:
            # A silent rank has not. A rank may also have left its snapshot on another disk: then nothing is known.
            return rank not in self._silent
        # The two ends of a message count it by numbers of their own, which cannot be compared.
        return not call.is_p2p and self._newest.get((call.group, rank), 0) >= call.number


def kinds_of(calls: Mapping[int, Collective]) -> dict[int, str]:
    """Give by rank, as text, what must be the same in all calls under one number: the name, and for some the sizes."""
    # A collective that has ended on one rank does not hang because of its sizes.
    has_ended = any(call.is_done for call in calls.values())
    kinds = {}
    for rank, call in calls.items():
        needs_sizes = not has_ended and any(name in call.name for name in _SAME_SIZES)
        kinds[rank] = f"{call.name} {call.sizes}" if needs_sizes else call.name
    return kinds


def short_name(call: Collective) -> str:
    """Give the name of a collective without its backend, and the sizes of its first tensors, if there are any."""
    name = call.name.partition(":")[2] or call.name
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in call.sizes[:2])
    return f"{name} of {sizes}" if sizes else name
