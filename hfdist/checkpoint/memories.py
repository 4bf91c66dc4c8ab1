"""Which ranks share a folder, and parts of files on their way between ranks that do not.

A checkpoint on the disk is one folder for all ranks. A replica in memory has a folder on each machine:

    machine A, ranks 0 and 1:   the shares of ranks 0, 1, and of 2, 3 of the machine before
    machine B, ranks 2 and 3:   the shares of ranks 2, 3, and of 0, 1 of the machine before
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from hfdist.checkpoint.manifest import Part
from hfdist.collectives import on_all_ranks, rank, world_size
from hfdist.control_group import ControlGroup

_CHUNK_BYTES = 4 * 2**20
_MOST_UNDER_WAY = 16
"""Chunks of one rank that are sent or awaited at a time."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Transfer(NamedTuple):
    """A part of a file, from a rank that has it to one whose folder lacks it."""

    part: Part
    sender: int
    receiver: int


@dataclass(frozen=True)
class Memories:
    """Which ranks share a folder. The machine after another is the next one; after the last comes the first."""

    of_rank: tuple[int, ...]
    """Number of each rank's folder; folders are counted in the order of their first ranks."""

    @classmethod
    def shared(cls) -> Memories:
        """One folder for all ranks, as on a shared disk."""
        return cls((0,) * world_size())

    @classmethod
    def find(cls, folder: Path) -> Memories:
        """Find out which ranks see the same `folder`, which exists. A collective."""

        def identify() -> str:
            status = folder.stat()
            # Containers of one machine have one boot id, and file systems of different numbers.
            machine = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.is_file() else platform.node()
            return f"{machine.strip()} {status.st_dev} {status.st_ino}"

        folders = on_all_ranks(identify)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(folders))}
        return cls(tuple(numbers[name] for name in folders))

    @property
    def count(self) -> int:
        """How many folders there are."""
        return max(self.of_rank) + 1

    @property
    def own(self) -> int:
        """The number of this rank's folder."""
        return self.of_rank[rank()]

    def ranks(self, memory: int) -> list[int]:
        """Give the ranks that share a folder; the first makes it."""
        return [number for number, own in enumerate(self.of_rank) if own == memory]

    @property
    def leads(self) -> bool:
        """Whether this rank makes, names and removes the folder that it shares."""
        return rank() == self.ranks(self.own)[0]

    def held(self) -> list[int]:
        """Give the ranks whose shares are kept in this rank's folder."""
        return [number for number, own in enumerate(self.of_rank) if own in {self.own, (self.own - 1) % self.count}]

    def list_for_all(self, parts: Sequence[Sequence[Part]]) -> list[Transfer]:
        """Give how each folder gets what every one keeps: parts by the rank that has written them."""
        leaders = [self.ranks(memory)[0] for memory in range(self.count)]
        return [
            Transfer(part, sender, leader)
            for sender, own in enumerate(parts)
            for memory, leader in enumerate(leaders)
            for part in own
            if memory != self.of_rank[sender]
        ]

    def list_spread(self, shares: Sequence[Sequence[Part]]) -> list[Transfer]:
        """Give how each folder gets the shares of the machine before: parts by the rank that has written them."""
        transfers = []
        for memory in range(self.count if self.count > 1 else 0):
            receivers = self.ranks((memory + 1) % self.count)
            for index, sender in enumerate(self.ranks(memory)):
                transfers += [Transfer(part, sender, receivers[index % len(receivers)]) for part in shares[sender]]
        return transfers


def move_parts(folder: Path, transfers: Sequence[Transfer], group: ControlGroup | None) -> None:
    """Copy parts between the ranks' folders, which hold all files at their full size. A collective.

    Args:
        folder: of this rank.
        transfers: of all ranks, in the same order on each.
        group: None: there is one process.
    """
    on_all_ranks(lambda: _move(folder, transfers, group), group)


def _move(folder: Path, transfers: Sequence[Transfer], group: ControlGroup | None) -> None:
    failure: OSError | None = None
    pairs = None if group is None else group.pairs
    number = 0
    # Begun in the same order on both sides, so that the oldest of all transfers is always under way on both.
    under_way: deque[tuple[dist.Work, torch.Tensor, Path | None, int]] = deque()

    def end_oldest() -> OSError | None:
        work, data, path, begin = under_way.popleft()
        work.wait()
        try:
            if path is not None:
                _write(path, data.numpy().data, begin)
        except OSError as error:
            return error
        return None

    for part, sender, receiver in transfers:
        chunks = range(part.begin, part.begin + part.num_bytes, _CHUNK_BYTES)
        number += len(chunks)
        if rank() not in (sender, receiver):
            continue
        for tag, begin in enumerate(chunks, start=number - len(chunks)):
            data = torch.zeros(min(_CHUNK_BYTES, part.begin + part.num_bytes - begin), dtype=torch.uint8)
            if rank() == sender:
                try:
                    # If a file has become shorter, zeros are sent in place of the rest, and the hash shows it.
                    _read(folder / part.file, data.numpy().data, begin)
                except OSError as error:
                    # The peer waits for what was announced: the failure is told when all has travelled.
                    failure = failure or error
                work = dist.isend(data, receiver, pairs, tag)
            else:
                work = dist.irecv(data, sender, pairs, tag)
            assert work is not None  # this rank is in the group
            under_way.append((work, data, folder / part.file if rank() == receiver else None, begin))
            if len(under_way) >= _MOST_UNDER_WAY:
                failure = end_oldest() or failure
    while under_way:
        failure = end_oldest() or failure
    if failure is not None:
        raise failure


def _read(path: Path, data: memoryview, position: int) -> None:
    # Each time anew: a process may have only so many files open, and one more call costs nothing beside a chunk.
    with path.open("rb", buffering=0) as file:
        os.preadv(file.fileno(), [data], position)


def _write(path: Path, data: memoryview, position: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while data:
            written = os.pwrite(descriptor, data, position)
            data, position = data[written:], position + written
    finally:
        os.close(descriptor)
