"""Replicas in memory: the newest state of a run, in the format of a checkpoint, in a folder on each machine.

The folder holds the shares of the machine's own ranks and those of the machine before it. So it outlives processes, and
what a machine has lost lies on the next one. A replica counts if each of its parts is somewhere with the right hash.
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
"""File in the run's folder of checkpoints: which folders in memory are its own."""
_HELD = "held.json"
"""File in a replica: the numbers of the parts that this machine holds, as `list_parts` gives them."""
_HEX_NAME = re.compile("[0-9a-f]{16}")


class Replicas:
    """The replicas of one run. All ranks make it and call its methods together.

    Only the line that was begun last counts: each start begins one, and so does a run that goes back. A replica that
    comes to light later, on a machine that was away, is of another line, and nobody takes it for the run's state.

    Args:
        memory: a folder in the memory of each machine, such as /dev/shm.
        checkpoints: the run's folder of checkpoints, on a disk that all machines share.

    Raises:
        ConfigError: somebody else could write there.
    """

    def __init__(self, memory: Path, checkpoints: Path) -> None:
        self._base = memory / f"hfdist-{os.geteuid()}"
        self._checkpoints = checkpoints
        on_all_ranks(lambda: _make_private(self._base))
        self._memories = Memories.find(self._base)
        self._run, line = on_rank_zero(self._read_names)
        self.folder = self._base / f"{self._run}-{line}"
        """Folder of the line that was begun last."""
        self._held: list[set[int]] = []
        """Numbers of the parts of the replica that was found, by memory."""
        self.has_written = False
        """Whether a replica was written; then there is room for two."""
        self.passed_over: list[str] = []
        """What is wrong with replicas that `find` did not take, and on which machine; the same on all ranks."""

    # ---- which replicas are the run's ----

    def _read_names(self) -> list[str]:
        with suppress(OSError, CheckpointError, KeyError, TypeError):
            content = read_json(self._checkpoints / NAMES_FILE)
            names = [str(content["run"]), str(content["line"])]
            # Not of a copy of the run's folder.
            if all(map(_HEX_NAME.fullmatch, names)) and content["inode"] == self._checkpoints.stat().st_ino:
                return names
        return [secrets.token_hex(8), secrets.token_hex(8)]

    def _write_names(self) -> str:
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        line = secrets.token_hex(8)
        content = {"run": self._run, "line": line, "inode": self._checkpoints.stat().st_ino}
        write_atomically(self._checkpoints / NAMES_FILE, json.dumps(content).encode())
        return line

    def begin_line(self, start: Path | None) -> Path | None:
        """Begin a line with `start`, if that is a replica, and remove all others; give the place of `start` then."""
        is_replica = start is not None and self.holds(start)
        line = on_rank_zero(self._write_names)
        before, self.folder = self.folder, self._base / f"{self._run}-{line}"

        def move() -> None:
            if not self._memories.leads:
                return
            self.folder.mkdir(mode=0o700)
            if start is not None and is_replica:
                (before / start.name).rename(self.folder / start.name)
            for other in self._base.glob(f"{self._run}-*"):
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

        on_all_ranks(move)
        return self.folder / start.name if start is not None and is_replica else start

    def holds(self, checkpoint: Path) -> bool:
        """Whether a path is one of a replica of this line."""
        return checkpoint.parent == self.folder

    def give_up(self, checkpoint: Path) -> None:
        """Remove what this machine has of a replica that cannot be read: the next start is from elsewhere."""
        shutil.rmtree(checkpoint, ignore_errors=True)

    def remove(self) -> None:
        """Remove all: the run has ended, and what it needs is on the disk."""
        if self._memories.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                # Not if other runs use it.
                self._base.rmdir()
        if rank() == 0:
            (self._checkpoints / NAMES_FILE).unlink(missing_ok=True)

    # ---- writing ----

    def write(self, step: int, contents: Contents, group: ControlGroup | None) -> int:
        """Write a replica, and remove the one before; give its bytes. May be called in a thread, with its own group.

        Raises:
            CheckpointError, NumericsError: as of `write_folder`.
            ResourceError: the memory has no room; of the first, if there is none for two.
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
        # The replica before stays until now, for a machine that had not come so far.
        on_all_ranks(remove_others, group)
        self.has_written = True
        return contents.plan.num_bytes

    def _list_held(self, unfinished: Path, manifest: Manifest, parts: list[Part]) -> list[int]:
        """Numbers of the parts that this machine has got: what each one gets, and the shares that it keeps."""
        ranks = self._memories.held()
        own = {random_file(number) for number in ranks}
        shares = {part for number in ranks for part in read_hashes(unfinished, manifest.files_of_hashes[number])}
        return [n for n, part in enumerate(parts) if part in shares or part.file in own or _is_everywhere(part)]

    def _check_room(self, num_bytes: int) -> None:
        # While the next replica is written, this one stays.
        free = min(shutil.disk_usage(self._base).free, psutil.virtual_memory().available)
        if free < num_bytes:
            found = f"{2 * num_bytes:,} bytes needed for two on this machine, {num_bytes + free:,} bytes free"
            raise ResourceError("no room", found=found)

    # ---- finding ----

    def find(self, at_least: int) -> Path | None:
        """Give the newest replica of step `at_least` or later of which each part is somewhere, verified; or None.

        Each machine gets its small files, if they were lost there; `fetch` gets the tensors.
        """
        self.passed_over = []
        listed = [{(step, digest) for step, digest in of_rank} for of_rank in on_all_ranks(self._list)]
        of_memory = [listed[self._memories.ranks(memory)[0]] for memory in range(self._memories.count)]
        for step, digest in sorted(set().union(*of_memory), reverse=True):
            if step < at_least:
                break
            holders = [number for number, replicas in enumerate(of_memory) if (step, digest) in replicas]
            path = self.folder / step_name(step)
            if not self._verify(path, holders):
                continue
            try:
                self._lay_out(path, holders)
                parts = list_parts(path, read_manifest(path))
                self._bring(path, parts, {number for number, part in enumerate(parts) if _is_small(part)})
            except (HfdistError, OSError) as error:
                # All ranks have raised, each in its own words.
                self.passed_over.append(f"{path.name}: {gather_json(str(error))[0]}")
            else:
                return path
        return None

    def _list(self) -> list[tuple[int, str]]:
        """Step and hash of each replica that this machine has; on the first rank of the machine."""
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
        """Hash what the machines hold, shared among their ranks, and say whether each part is somewhere."""

        def check() -> list[object]:
            if self._memories.own not in holders:
                return [0, [], []]
            parts, own_ranks = list_parts(path, read_manifest(path)), self._memories.ranks(self._memories.own)
            numbers = [(n, parts[n].num_bytes, range(len(own_ranks))) for n in _read_held(path, len(parts))]
            own = balance_by_bytes(numbers, len(own_ranks))[own_ranks.index(rank())]
            good = [number for number in own if _can_be_read(path, parts[number])]
            return [len(parts), good, [_describe(parts[number]) for number in sorted({*own} - {*good})]]

        checked = on_all_ranks(check)
        self._held = [set() for _ in range(self._memories.count)]
        for number, (_, good, _) in enumerate(checked):
            self._held[self._memories.of_rank[number]] |= {*good}
        num_parts, found = max(count for count, _, _ in checked), set().union(*self._held)
        damaged = [f"{text} (of rank {number})" for number, (*_, bad) in enumerate(checked) for text in bad]
        is_whole = len(found) == num_parts
        if damaged or not is_whole:
            lost = f"{num_parts - len(found)} of {num_parts} parts are nowhere"
            outcome = "the other copy of each is used" if is_whole else lost
            text = f"{path.name}: {outcome}; damaged: {list_first(damaged) or 'none'}"
            self.passed_over += [] if is_whole else [text]
            if rank() == 0:
                logger.warning("the replica in memory of %s", text)
        return is_whole

    def _lay_out(self, path: Path, holders: Sequence[int]) -> None:
        """Make the folder, with files without content, on machines that have lost it."""
        if len(holders) == self._memories.count:
            return
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
        """Get what this rank is about to read, where its machine does not hold it."""
        parts = list_parts(path, read_manifest(path))
        begins: dict[str, list[tuple[int, int]]] = {}
        for number, part in enumerate(parts):
            begins.setdefault(part.file, []).append((part.begin, number))
        wanted: set[int] = set()
        for file, begin, end in ranges:
            of_file = begins[file.relative_to(path).as_posix()]
            first = max(bisect_right(of_file, (begin, len(parts))) - 1, 0)
            wanted |= {number for start, number in of_file[first:] if start < end}
        self._bring(path, parts, wanted)

    def _bring(self, path: Path, parts: Sequence[Part], wanted: set[int]) -> None:
        """Copy parts to this machine from the next one that holds them. A collective."""
        memories = self._memories
        lacking = [set(numbers) for numbers in gather_json(sorted(wanted - self._held[memories.own]))]
        coming: list[set[int]] = [set() for _ in range(memories.count)]
        transfers = []
        for receiver, numbers in enumerate(lacking):
            memory = memories.of_rank[receiver]
            for number in sorted(numbers - coming[memory]):
                others = ((memory + distance) % memories.count for distance in range(1, memories.count))
                senders = memories.ranks(next(other for other in others if number in self._held[other]))
                transfers.append(Transfer(parts[number], senders[number % len(senders)], receiver))
                coming[memory].add(number)
        if not transfers:
            return
        move_parts(path, transfers, control_group())

        def check() -> None:
            for part, _, receiver in transfers:
                if receiver == rank() and not is_intact(path, part):
                    what = "a part of a replica in memory was damaged on its way between machines"
                    raise CheckpointError(what, where=str(path), found=_describe(part), hint="start it again")

        on_all_ranks(check)
        for held, arrived in zip(self._held, coming, strict=True):
            held |= arrived
        if memories.leads:
            write_atomically(path / _HELD, json.dumps(sorted(self._held[memories.own])).encode(), is_durable=False)
        if rank() == 0:
            num_bytes = sum(transfer.part.num_bytes for transfer in transfers)
            logger.info("%s: %s came from the memory of other machines", path.name, size(num_bytes))


def _make_private(folder: Path) -> None:
    """Make a folder of this user alone, where others may write beside it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        what, hint = "others may write where replicas are kept", "remove it, or another checkpoint.replicate_dir"
        mode = f"mode {stat.filemode(found.st_mode)}, owner {found.st_uid}"
        raise ConfigError(what, where=str(folder), found=mode, allowed="a folder of yours, mode 0700", hint=hint)


def _read_held(path: Path, num_parts: int) -> list[int]:
    """What a machine holds, as it says; what is damaged holds nothing, and each part is verified."""
    with suppress(OSError, CheckpointError, TypeError):
        return [number for number in read_json(path / _HELD) if type(number) is int and 0 <= number < num_parts]
    return []


def _can_be_read(path: Path, part: Part) -> bool:
    with suppress(OSError):
        return is_intact(path, part)
    return False


def _is_everywhere(part: Part) -> bool:
    """Whether each machine gets a part: headers of tensors, and other files that are not of a single rank."""
    return (part.begin == 0 or not part.file.endswith(".safetensors")) and not part.file.startswith(RANDOM_STEM)


def _is_small(part: Part) -> bool:
    """Whether each start needs a part before it knows what its ranks read."""
    return part.file == random_file(rank()) or _is_everywhere(part)


def _describe(part: Part) -> str:
    return f"{part.file}, bytes {part.begin} to {part.begin + part.num_bytes}"
