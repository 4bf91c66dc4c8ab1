"""Replicas in memory: the newest state of a run, in the format of a checkpoint, in a folder on each machine.

    machine A    small files    shares of the ranks of A    shares of the ranks of C
    machine B    small files    shares of the ranks of B    shares of the ranks of A
    machine C    small files    shares of the ranks of C    shares of the ranks of B

The folders outlive the processes, and a replica outlives the loss of one machine. It counts if each of its parts is on
some machine with the right hash.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import stat
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from hfdist.atomic_write import write_atomically
from hfdist.checkpoint import folder as folders
from hfdist.checkpoint.folder import commit, list_checkpoints, remove_unfinished, step_name, temporary
from hfdist.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Part,
    is_intact,
    list_parts,
    read_hashes,
    read_json,
    read_manifest,
    write_json,
)
from hfdist.checkpoint.memories import Memories, Transfer, move_parts
from hfdist.checkpoint.random_state import RANDOM_STEM, random_file
from hfdist.checkpoint.read import ByteRange
from hfdist.checkpoint.regions import balance_by_bytes
from hfdist.checkpoint.write import Contents, write_folder
from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero, rank
from hfdist.control_group import ControlGroup, control_group
from hfdist.errors import CheckpointError, ConfigError, HfdistError, ResourceError
from hfdist.units import list_first, size

logger = logging.getLogger(__name__)

NAMES_FILE = "replicas.json"
"""File in the run's folder of checkpoints: the names of the run and of its line, which make the name of the folder."""
_HELD = "held.json"
"""File in a replica: which parts this machine has, as indices of what `list_parts` gives."""
_HEX_NAME = re.compile("[0-9a-f]{16}")


class _Names(NamedTuple):
    """The two halves of the name of a folder of replicas, each a random word."""

    run: str
    line: str


class _Checked(NamedTuple):
    """What a rank has found in its share of a replica. It travels as a list of these values."""

    num_parts: int
    """Parts of the whole replica; 0: this machine has nothing of it."""
    good: list[int]
    """Indices of the parts that this rank has read, and that have their hash."""
    damaged: list[str]
    """Descriptions of the parts that have not."""


class Replicas:
    """The replicas of one run. All ranks make it and call its methods together.

    A line is the replicas from a start of the run to the next start, or until the run goes back. Only the line that was
    begun last counts. A replica that comes to light later, on a machine that was away, is of another line, and nobody
    takes it for the run's state.

    Args:
        memory: a folder in the memory of each machine, such as /dev/shm.
        checkpoints: the run's folder of checkpoints, on a disk that all machines share.

    Raises:
        ConfigError: somebody else could write into the folder of replicas.
    """

    def __init__(self, memory: Path, checkpoints: Path) -> None:
        self._base = memory / f"hfdist-{os.geteuid()}"
        self._checkpoints = checkpoints
        on_all_ranks(lambda: _make_private(self._base))
        self._memories = Memories.find(self._base)
        names = _Names(*on_rank_zero(self._read_names))
        self._run = names.run
        self.folder = self._base / f"{names.run}-{names.line}"
        """Folder of the line that was begun last."""
        self._held: list[set[int]] = []
        """Indices of the parts of the replica that was found, for each memory that has them."""
        self.has_written = False
        """Whether this object has written a replica. The memory then had room for two."""
        self.passed_over: list[str] = []
        """Damage of the replicas that `find` did not take, as text with the rank; the same on all ranks."""

    # ---- which replicas are the run's ----

    def _read_names(self) -> _Names:
        """Read the names in the run's folder; new ones, if there are none."""
        # Without the file, or with a damaged one, the run has no replicas.
        with suppress(OSError, CheckpointError, KeyError, TypeError):
            content = read_json(self._checkpoints / NAMES_FILE)
            names = _Names(str(content["run"]), str(content["line"]))
            # A copy of the run's folder has another inode: the replicas are not those of the copy.
            if all(map(_HEX_NAME.fullmatch, names)) and content["inode"] == self._checkpoints.stat().st_ino:
                return names
        return _Names(secrets.token_hex(8), secrets.token_hex(8))

    def _begin_names(self) -> str:
        """Write names with a new line, and give the name of the line."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        line = secrets.token_hex(8)
        content = {"run": self._run, "line": line, "inode": self._checkpoints.stat().st_ino}
        write_atomically(self._checkpoints / NAMES_FILE, json.dumps(content).encode())
        return line

    def begin_line(self, start: Path | None) -> Path | None:
        """Begin a new line, and remove the older ones.

        Args:
            start: what the run goes on from: a checkpoint, or a replica, which is moved to the new line; None: nothing.

        Returns:
            The path of `start` from now on.
        """
        replica = start if start is not None and self.holds(start) else None
        line = on_rank_zero(self._begin_names)
        self.folder = self._base / f"{self._run}-{line}"

        def move() -> None:
            if not self._memories.leads:
                return
            self.folder.mkdir(mode=0o700)
            if replica is not None:
                replica.rename(self.folder / replica.name)
            for other in self._base.glob(f"{self._run}-*"):
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

        on_all_ranks(move)
        return start if replica is None else self.folder / replica.name

    def holds(self, checkpoint: Path) -> bool:
        """Whether a path is that of a replica of this line."""
        return checkpoint.parent == self.folder

    def give_up(self, checkpoint: Path) -> None:
        """Remove this machine's files of a replica that cannot be read, so that the next start is from elsewhere."""
        shutil.rmtree(checkpoint, ignore_errors=True)

    def remove(self) -> None:
        """Remove the replicas of a run that has ended: its checkpoints are on the disk."""
        if self._memories.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                # The folder is not empty if other runs use it, too.
                self._base.rmdir()
        if rank() == 0:
            (self._checkpoints / NAMES_FILE).unlink(missing_ok=True)

    # ---- writing ----

    def write(self, step: int, contents: Contents, group: ControlGroup | None) -> int:
        """Write a replica, and then remove the one before.

        Args:
            step: number of optimizer steps that the state has done.
            contents: what this rank writes.
            group: the group of the thread that calls this; None: there is one process.

        Returns:
            Bytes of the tensor files of all ranks.

        Raises:
            CheckpointError: files cannot be written.
            NumericsError: a trained parameter or its state is not finite.
            ResourceError: the memory has no room for it; or, at the first replica, none for a second one.
        """
        path = self.folder / step_name(step)

        def start() -> Path:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            remove_unfinished(self.folder)
            return temporary(path)

        def finish(unfinished: Path, written: list[Part]) -> None:
            manifest = contents.manifest(step, written)
            manifest.write(unfinished)
            parts = list_parts(unfinished, manifest)
            held = self._list_held(unfinished, manifest, parts)
            # A replica that is there, as after a start from it, is still there when the next one is written.
            if not self.has_written and not list_checkpoints(self.folder):
                self._check_room(sum(parts[number].num_bytes for number in held))
            write_json(unfinished / _HELD, json.dumps(held))
            commit(unfinished, path, is_whole=self._memories.count == 1)

        def remove_others() -> None:
            if self._memories.leads:
                for other in list_checkpoints(self.folder):
                    if other != path:
                        folders.remove(other)

        try:
            write_folder(contents, self.folder, start, finish, group, self._memories)
        except ResourceError as error:
            raise ResourceError(
                "the memory has no room for replicas of the state",
                where=f"checkpoint.replicate_dir: {self._base.parent}",
                found=error.found,
                hint="checkpoint.replicate_every=null, or a larger folder in memory for checkpoint.replicate_dir",
            ) from error
        # Only now, as all machines have the new one.
        on_all_ranks(remove_others, group)
        self.has_written = True
        return contents.plan.num_bytes

    def _list_held(self, unfinished: Path, manifest: Manifest, parts: list[Part]) -> list[int]:
        """List the indices of the parts that this machine has: common ones, and those of the ranks that it keeps."""
        ranks = self._memories.held()
        random_files = {random_file(number) for number in ranks}
        shares = {part for number in ranks for part in read_hashes(unfinished, manifest.files_of_hashes[number])}
        return [
            index
            for index, part in enumerate(parts)
            if part in shares or part.file in random_files or _is_everywhere(part)
        ]

    def _check_room(self, num_bytes: int) -> None:
        """Refuse a memory without room for another replica of this size, as the next is written while this one stays.

        Raises:
            ResourceError: there is no such room.
        """
        free = min(shutil.disk_usage(self._base).free, psutil.virtual_memory().available)
        if free < num_bytes:
            found = f"{2 * num_bytes:,} bytes needed for two on this machine, {num_bytes + free:,} bytes free"
            raise ResourceError("no room", found=found)

    # ---- finding ----

    def find(self, at_least: int) -> Path | None:
        """Find the newest replica of which each part is on some machine, and verify it.

        Each machine gets the small files that it has lost; `fetch` gets the tensors.

        Args:
            at_least: the oldest step that is of use.

        Returns:
            The path of the replica; None: there is none.
        """
        self.passed_over = []
        listed = on_all_ranks(self._list)
        # Those of the first rank of each memory: the others list nothing.
        by_memory = [
            {(step, digest) for step, digest in listed[self._memories.ranks(memory)[0]]}
            for memory in range(self._memories.count)
        ]
        for step, digest in sorted(set().union(*by_memory), reverse=True):
            if step < at_least:
                break
            holders = [memory for memory, replicas in enumerate(by_memory) if (step, digest) in replicas]
            path = self.folder / step_name(step)
            if not self._verify(path, holders):
                continue
            try:
                self._lay_out(path, holders)
                parts = list_parts(path, read_manifest(path))
                self._bring(path, parts, {index for index, part in enumerate(parts) if _is_needed_first(part)})
            except (HfdistError, OSError) as error:
                # All ranks have raised, each in its own words.
                self.passed_over.append(f"{path.name}: {gather_json(str(error))[0]}")
            else:
                return path
        return None

    def _list(self) -> list[tuple[int, str]]:
        """List step and manifest's hash of each replica that this machine has; on other ranks than its first none."""
        if not self._memories.leads or not self.folder.is_dir():
            return []
        remove_unfinished(self.folder)
        replicas = []
        for path in list_checkpoints(self.folder):
            try:
                manifest = read_manifest(path)
                list_parts(path, manifest)
            except (CheckpointError, OSError) as error:
                logger.warning("a replica in memory cannot be used: %s", error)
            else:
                replicas.append((manifest.step, manifest.digest))
        return replicas

    def _verify(self, path: Path, holders: Sequence[int]) -> bool:
        """Check all parts that the machines in `holders` have, and say whether each part is on some machine.

        The ranks of a machine share its parts.
        """
        checked = [_Checked(*values) for values in on_all_ranks(lambda: self._check_share(path, holders))]
        self._held = [set() for _ in range(self._memories.count)]
        damaged = []
        for number, of_rank in enumerate(checked):
            self._held[self._memories.of_rank[number]].update(of_rank.good)
            damaged += [f"{text} (of rank {number})" for text in of_rank.damaged]
        num_parts = max(of_rank.num_parts for of_rank in checked)
        num_lost = num_parts - len(set().union(*self._held))
        if damaged or num_lost:
            lost = f"{num_lost} of {num_parts} parts are nowhere"
            outcome = lost if num_lost else "the other copy of each is used"
            text = f"{path.name}: {outcome}; damaged: {list_first(damaged) or 'none'}"
            if num_lost:
                self.passed_over.append(text)
            if rank() == 0:
                logger.warning("the replica in memory of %s", text)
        return num_lost == 0

    def _check_share(self, path: Path, holders: Sequence[int]) -> _Checked:
        """Read this rank's share of the parts that its machine has, and compare their hashes."""
        if self._memories.own not in holders:
            return _Checked(0, [], [])
        parts = list_parts(path, read_manifest(path))
        own_ranks = self._memories.ranks(self._memories.own)
        everybody = range(len(own_ranks))
        items = [(index, parts[index].num_bytes, everybody) for index in _read_held(path, len(parts))]
        share = balance_by_bytes(items, len(own_ranks))[own_ranks.index(rank())]
        good = [index for index in share if _can_be_read(path, parts[index])]
        damaged = [_describe(parts[index]) for index in sorted(set(share) - set(good))]
        return _Checked(len(parts), good, damaged)

    def _lay_out(self, path: Path, holders: Sequence[int]) -> None:
        """Make the folder on machines that have lost it: manifest and hashes, and the other files at their size."""
        if len(holders) == self._memories.count:
            return
        # The first rank of the first machine that has the replica.
        source = self._memories.ranks(holders[0])[0]

        def read() -> dict[str, str]:
            names = [MANIFEST, *(part.file for part in read_manifest(path).files_of_hashes)]
            return {name: (path / name).read_text(encoding="utf-8") for name in names}

        texts = on_all_ranks(lambda: read() if rank() == source else {})[source]

        def make() -> None:
            if not self._memories.leads or self._memories.own in holders:
                return
            shutil.rmtree(path, ignore_errors=True)  # of the same step, but not the same bytes
            unfinished = temporary(path)
            unfinished.mkdir(parents=True)
            (unfinished / MANIFEST).write_text(texts.pop(MANIFEST), encoding="utf-8")
            for name, num_bytes in read_manifest(unfinished).files.items():
                (unfinished / name).parent.mkdir(exist_ok=True)
                with (unfinished / name).open("wb") as file:
                    file.write(texts.get(name, "").encode())
                    file.truncate(num_bytes)
            (unfinished / _HELD).write_text("[]", encoding="ascii")
            unfinished.rename(path)

        on_all_ranks(make)

    def fetch(self, path: Path, ranges: Sequence[ByteRange]) -> None:
        """Get the bytes that this rank is about to read from other machines, where its own does not have them.

        A collective.

        Args:
            path: the replica that `find` has given.
            ranges: the bytes that this rank reads.
        """
        parts = list_parts(path, read_manifest(path))
        by_file: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            by_file.setdefault(part.file, []).append(index)
        wanted: set[int] = set()
        for file, begin, end in ranges:
            indices = by_file[file.relative_to(path).as_posix()]
            # The last part that begins at `begin` or before, and those after it.
            first = max(bisect_right(indices, begin, key=lambda index: parts[index].begin) - 1, 0)
            for index in indices[first:]:
                if parts[index].begin >= end:
                    break
                wanted.add(index)
        self._bring(path, parts, wanted)

    def _list_transfers(self, parts: Sequence[Part], wanted: set[int]) -> list[Transfer]:
        """Say how each machine gets the parts that its ranks want and it does not have. A collective."""
        memories = self._memories
        lacking = gather_json(sorted(wanted - self._held[memories.own]))
        coming: list[set[int]] = [set() for _ in range(memories.count)]
        transfers = []
        for receiver, indices in enumerate(lacking):
            memory = memories.of_rank[receiver]
            for index in indices:
                if index in coming[memory]:
                    # Another rank of the machine gets it.
                    continue
                coming[memory].add(index)
                following = ((memory + distance) % memories.count for distance in range(1, memories.count))
                senders = memories.ranks(next(other for other in following if index in self._held[other]))
                transfers.append(Transfer(parts[index], senders[index % len(senders)], receiver))
        return transfers

    def _bring(self, path: Path, parts: Sequence[Part], wanted: set[int]) -> None:
        """Copy parts to this machine, each from the next machine that has it. A collective.

        Raises:
            CheckpointError: a part was damaged on its way.
        """
        memories = self._memories
        transfers = self._list_transfers(parts, wanted)
        if not transfers:
            return
        move_parts(path, transfers, control_group())

        def check() -> None:
            for part, _, receiver in transfers:
                if receiver == rank() and not is_intact(path, part):
                    what = "a part of a replica in memory was damaged on its way between machines"
                    raise CheckpointError(what, where=str(path), found=_describe(part), hint="start it again")

        on_all_ranks(check)
        index_of = {part: index for index, part in enumerate(parts)}
        for part, _, receiver in transfers:
            self._held[memories.of_rank[receiver]].add(index_of[part])
        if memories.leads:
            write_atomically(path / _HELD, json.dumps(sorted(self._held[memories.own])).encode(), is_durable=False)
        if rank() == 0:
            num_bytes = sum(transfer.part.num_bytes for transfer in transfers)
            logger.info("%s: %s came from the memory of other machines", path.name, size(num_bytes))


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can write into; ConfigError: there is one that others can write into."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        what, hint = "others may write where replicas are kept", "remove it, or another checkpoint.replicate_dir"
        mode = f"mode {stat.filemode(found.st_mode)}, owner {found.st_uid}"
        raise ConfigError(what, where=str(folder), found=mode, allowed="a folder of yours, mode 0700", hint=hint)


def _read_held(path: Path, num_parts: int) -> list[int]:
    """Read the indices of the parts that this machine has; none, if the file is damaged."""
    with suppress(OSError, CheckpointError, TypeError):
        return [number for number in read_json(path / _HELD) if type(number) is int and 0 <= number < num_parts]
    return []


def _can_be_read(path: Path, part: Part) -> bool:
    """Whether a part is there with its hash; one that cannot be read is not."""
    with suppress(OSError):
        return is_intact(path, part)
    return False


def _is_everywhere(part: Part) -> bool:
    """Whether each machine gets a part: headers of tensors, and other files, except those of a single rank."""
    if part.file.startswith(RANDOM_STEM):
        return False
    is_header = part.begin == 0
    return is_header or not part.file.endswith(".safetensors")


def _is_needed_first(part: Part) -> bool:
    """Whether this rank needs a part before it knows which tensors it reads."""
    return part.file == random_file(rank()) or _is_everywhere(part)


def _describe(part: Part) -> str:
    return f"{part.file}, bytes {part.begin} to {part.begin + part.num_bytes}"
