"""Memories: folders that some ranks share and others do not see, and how parts of files travel between them.

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
"""The most bytes that travel as one message."""
_MOST_UNDER_WAY = 16
"""Chunks of one rank that are sent or awaited at a time."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A text that tells machines apart, even where several have the same name."""


class Transfer(NamedTuple):
    """A part of a file, from a rank that has it to one whose folder lacks it."""

    part: Part
    sender: int
    receiver: int


@dataclass(frozen=True)
class Memories:
    """Which ranks share a folder. Folders have numbers in the order of their first ranks, and stand in a ring."""

    of_rank: tuple[int, ...]
    """Number of the folder of each rank, by rank."""

    @classmethod
    def shared(cls) -> Memories:
        """Give one folder for all ranks, as on a shared disk."""
        return cls((0,) * world_size())

    @classmethod
    def find(cls, folder: Path) -> Memories:
        """Find out which ranks see the same `folder`, which exists. A collective."""

        def identify() -> str:
            status = folder.stat()
            # Containers of one machine have the same boot id; the device number tells their file systems apart.
            machine = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.is_file() else platform.node()
            return f"{machine.strip()} {status.st_dev} {status.st_ino}"

        folders = on_all_ranks(identify)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(folders))}
        return cls(tuple(numbers[name] for name in folders))

    @property
    def count(self) -> int:
        """Number of folders."""
        return max(self.of_rank) + 1

    @property
    def own(self) -> int:
        """Number of this rank's folder."""
        return self.of_rank[rank()]

    def ranks(self, memory: int) -> list[int]:
        """Give the ranks that share the folder of this number, in order."""
        return [number for number, its_memory in enumerate(self.of_rank) if its_memory == memory]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first that shares its folder: it makes, names and removes the folder."""
        return rank() == self.ranks(self.own)[0]

    def held(self) -> list[int]:
        """Give the ranks whose shares are kept in this rank's folder."""
        kept = {self.own, (self.own - 1) % self.count}
        return [number for number, memory in enumerate(self.of_rank) if memory in kept]

    def list_for_all(self, parts: Sequence[Sequence[Part]]) -> list[Transfer]:
        """List the transfers by which all folders get the same parts.

        Args:
            parts: for each rank, the parts that it has written.
        """
        leaders = [self.ranks(memory)[0] for memory in range(self.count)]
        transfers = []
        for sender, of_sender in enumerate(parts):
            for leader in leaders:
                if self.of_rank[leader] != self.of_rank[sender]:
                    transfers += [Transfer(part, sender, leader) for part in of_sender]
        return transfers

    def list_spread(self, shares: Sequence[Sequence[Part]]) -> list[Transfer]:
        """List the transfers by which each folder gets the shares of the ranks of the one before.

        Args:
            shares: for each rank, the parts that it has written.
        """
        transfers: list[Transfer] = []
        if self.count == 1:
            return transfers
        for memory in range(self.count):
            receivers = self.ranks((memory + 1) % self.count)
            for index, sender in enumerate(self.ranks(memory)):
                receiver = receivers[index % len(receivers)]
                transfers += [Transfer(part, sender, receiver) for part in shares[sender]]
        return transfers


def move_parts(folder: Path, transfers: Sequence[Transfer], group: ControlGroup | None) -> None:
    """Copy parts between the ranks' folders, which hold all files at their full size. A collective.

    Args:
        folder: this rank's folder.
        transfers: the transfers of all ranks, in the same order on each.
        group: the group of the thread that calls this; None: there is one process.

    Raises:
        CheckpointError: a file cannot be read or written; on all ranks alike.
    """
    on_all_ranks(lambda: _Mover(folder, group).move(transfers), group)


class _Chunk(NamedTuple):
    """A chunk of a file that travels."""

    work: dist.Work
    data: torch.Tensor
    path: Path
    begin: int
    is_received: bool


class _Mover:
    """This rank's end of transfers. Both ends begin them in the same order, so that none waits for a later one."""

    def __init__(self, folder: Path, group: ControlGroup | None) -> None:
        self._folder, self._pairs = folder, None if group is None else group.pairs
        self._under_way: deque[_Chunk] = deque()
        self._failure: OSError | None = None
        """The first failure: it is raised when all has travelled, as the other end waits for what was announced."""

    def move(self, transfers: Sequence[Transfer]) -> None:
        """Send and receive all chunks of this rank; OSError: a file cannot be read or written."""
        first_tag = 0
        for part, sender, receiver in transfers:
            begins = range(part.begin, part.begin + part.num_bytes, _CHUNK_BYTES)
            if rank() in (sender, receiver):
                for tag, begin in enumerate(begins, start=first_tag):
                    num_bytes = min(_CHUNK_BYTES, part.begin + part.num_bytes - begin)
                    self._under_way.append(self._begin(part.file, begin, num_bytes, sender, receiver, tag))
                    if len(self._under_way) >= _MOST_UNDER_WAY:
                        self._end_oldest()
            # All ranks count the chunks of all, so that both ends know a chunk by the same tag.
            first_tag += len(begins)
        while self._under_way:
            self._end_oldest()
        if self._failure is not None:
            raise self._failure

    def _begin(self, file: str, begin: int, num_bytes: int, sender: int, receiver: int, tag: int) -> _Chunk:
        # A file that has become shorter leaves zeros, whose hash is another.
        path, data = self._folder / file, torch.zeros(num_bytes, dtype=torch.uint8)
        if rank() == sender:
            try:
                _read(path, data.numpy().data, begin)
            except OSError as error:
                self._failure = self._failure or error
            work = dist.isend(data, receiver, self._pairs, tag)
        else:
            work = dist.irecv(data, sender, self._pairs, tag)
        assert work is not None  # this rank is in the group
        return _Chunk(work, data, path, begin, is_received=rank() == receiver)

    def _end_oldest(self) -> None:
        chunk = self._under_way.popleft()
        chunk.work.wait()
        if chunk.is_received:
            try:
                _write(chunk.path, chunk.data.numpy().data, chunk.begin)
            except OSError as error:
                self._failure = self._failure or error


def _read(path: Path, data: memoryview, position: int) -> None:
    # Opened for each chunk: a process may have only so many files open, and one more call costs nothing beside a chunk.
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
