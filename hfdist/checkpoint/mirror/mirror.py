"""`Mirror`: the checkpoints of one run in a store, as lists of contents that several checkpoints share.

    mirror.json                 the version of this layout
    writer                      a random word of the process that began last: only that one writes
    contents/<xxh128>           at most 64 MiB of some file, under their hash
    step-00000100.json          the list of a checkpoint: the contents of its files, and the packs beside it

A content is written once, however many checkpoints have it. A list is written after its contents, and removed before
them: so a checkpoint whose list is there is whole, at every moment.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import xxhash

from hfdist.checkpoint.folder import (
    HELD_OUT_LOSS,
    Keep,
    commit,
    move_damaged_aside,
    remove_unfinished,
    step_of,
    temporary,
)
from hfdist.checkpoint.manifest import (
    MANIFEST,
    MAX_JSON_BYTES,
    DamagedError,
    inside,
    parse_json,
    read_manifest,
    verify,
)
from hfdist.checkpoint.mirror.listed import CONTENT_BYTES, CONTENTS, Content, ListedCheckpoint, lacks
from hfdist.checkpoint.mirror.objects import UNFINISHED, Objects
from hfdist.checkpoint.mirror.packs import (
    Pack,
    Part,
    Stamp,
    check_number,
    find_new,
    make_pack,
    read_pack,
    stamps_of,
    write_part,
)
from hfdist.checkpoint.saved import read_state
from hfdist.checkpoint.write import no_room, removed_on_failure
from hfdist.data.threads import thread_map
from hfdist.errors import CheckpointError
from hfdist.failures import is_full_disk
from hfdist.processes.startup import counted
from hfdist.version import __version__

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the layout."""

_TOGETHER = 4
"""Number of contents that are sent at a time."""
_DESCRIPTION = "mirror.json"
_WRITER = "writer"
_LIST = ".json"
"""End of the names of lists."""
_FULL = "the disk has no room for the checkpoint of the mirror"


class UploadProgress(NamedTuple):
    """How far an upload has come."""

    done_bytes: int
    """Bytes of the checkpoint that are in the mirror."""
    all_bytes: int
    """Bytes of the whole checkpoint."""
    new_bytes: int
    """Bytes that this upload has sent; all others were there already."""


class _Loss(NamedTuple):
    """A held-out loss, and the name of its checkpoint; the lowest loss is the least of these."""

    loss: float
    name: str


class Mirror:
    """The checkpoints of one run below an address. Only one thread writes: that of the process that began last.

    Every method raises a ResourceError if the store gives no answer, refuses, or is full.

    Args:
        objects: the objects below the address.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._changed: set[str] = set()
        """Names of contents whose bytes have changed in the store: the next upload writes them anew."""
        self._packs: list[Pack] = []
        """Packs of the newest list that this process has written, or brought to this machine."""
        self._stamps: dict[str, Stamp] = {}
        """Stamps of the files, by name, when these packs were made of them."""
        self._word = secrets.token_hex(16).encode()
        """The word by which this process says that it writes."""
        self._is_claimed = False

    @property
    def shown(self) -> str:
        """The address as messages show it."""
        return self._objects.shown

    def open(self) -> list[str]:
        """Give the names of the checkpoints, the oldest first, and make the mirror if there is none.

        Raises:
            CheckpointError: the mirror has another version of the layout.
        """
        there = self._look()
        if _DESCRIPTION not in there:
            self._describe()
        return _names(there)

    def names(self) -> list[str]:
        """Give the names of the checkpoints, the oldest first; of a mirror that does not exist, none.

        Raises:
            CheckpointError: the mirror has another version of the layout.
        """
        return _names(self._look())

    def claim(self) -> None:
        """Write the word of this process, so that it alone writes from now on: an earlier one finds another word."""
        self._objects.write({_WRITER: self._word})
        self._is_claimed = True

    def _check_writer(self, there: Mapping[str, int]) -> None:
        """Claim the mirror, if that was not possible before; CheckpointError: another process has claimed it since."""
        if not self._is_claimed or _WRITER not in there:
            self.claim()
        elif self._objects.read(_WRITER, min(there[_WRITER], len(self._word) + 1)) != self._word:
            raise CheckpointError(
                "another run has begun to write this mirror, so this one does not any more",
                where=self.shown,
                hint="end one of the two; for two runs, each its own run.name",
            )

    def _look(self) -> dict[str, int]:
        """Give the size of each object, by name; CheckpointError: the mirror has another version of the layout."""
        there = self._objects.list()
        if _DESCRIPTION not in there:
            return there
        try:
            found = parse_json(self._objects.read(_DESCRIPTION, min(there[_DESCRIPTION], MAX_JSON_BYTES)))["format"]
        except (ValueError, RecursionError, TypeError, KeyError):
            found = "none"
        if found != FORMAT:
            hint = "the version of hfdist that made it, or another checkpoint.mirror"
            raise CheckpointError(
                "a mirror of another format",
                where=self.shown,
                found=f"format {found}",
                allowed=f"format {FORMAT}, which hfdist {__version__} reads",
                hint=hint,
            )
        return there

    def _describe(self) -> None:
        self._objects.write({_DESCRIPTION: json.dumps({"format": FORMAT, "hfdist": __version__}).encode()})

    def _read(self, name: str, there: Mapping[str, int]) -> ListedCheckpoint:
        """Read the list of a checkpoint; DamagedError: it has changed.

        `there`, here and below: size of each object of the mirror in bytes, by name.
        """
        place, num_bytes = f"{self.shown}/{name}{_LIST}", there.get(f"{name}{_LIST}", 0)
        if num_bytes > MAX_JSON_BYTES:
            raise DamagedError("bad-list", "a list of the mirror is damaged", where=place, found=f"{num_bytes} bytes")
        return ListedCheckpoint.from_bytes(self._objects.read(f"{name}{_LIST}", num_bytes), place)

    # ---- to the mirror ----

    def send(
        self,
        path: Path,
        tell: Callable[[UploadProgress], object] = lambda sent: None,
        beside: Mapping[str, Path] = MappingProxyType({}),
    ) -> UploadProgress:
        """Send a checkpoint of this machine: the contents that are not there yet, and then its list.

        Args:
            path: the checkpoint, which must stay as it is meanwhile.
            tell: called now and then with the progress; what it raises ends the upload.
            beside: paths of files that may grow meanwhile, by the names that `fetch_beside` gives them; they are sent
                as they are now.

        Returns:
            The progress at the end.

        Raises:
            CheckpointError: the checkpoint is damaged; contents that were sent are not there; or another process
                writes this mirror by now.
        """
        manifest, there = read_manifest(path), self._objects.list()
        self._check_writer(there)
        sizes = manifest.files | {MANIFEST: (path / MANIFEST).stat().st_size}
        all_bytes = sum(sizes.values())
        if f"{path.name}{_LIST}" in there and self._has(path.name, manifest.digest, there):
            return UploadProgress(all_bytes, all_bytes, 0)
        files: dict[str, list[Content]] = {name: [] for name in sizes}
        sent = UploadProgress(0, all_bytes, 0)
        for sent in self._send_files(path, sizes, files, there):
            tell(sent)
        packs, stamps = [], stamps_of(beside)
        for pack, new_bytes in self._send_packs(beside, there, stamps):
            packs.append(pack)
            sent = sent._replace(new_bytes=sent.new_bytes + new_bytes)
            tell(sent)
        tell(sent)
        listed = ListedCheckpoint(
            step=manifest.step,
            digest=manifest.digest,
            held_out_loss=_loss_of(path),
            files=files,
            packs=[pack.content for pack in packs],
        )
        self._complete(path.name, listed)
        self._packs, self._stamps = packs, stamps
        return sent

    def _send_files(
        self, path: Path, sizes: Mapping[str, int], files: Mapping[str, list[Content]], there: dict[str, int]
    ) -> Iterator[UploadProgress]:
        """Send the contents of a checkpoint that are not there yet, a few at a time, and give the progress before each.

        Args:
            path: the checkpoint.
            sizes: bytes of each of its files.
            files: gets the contents of each file.
            there: gets the sizes of new objects.
        """
        sent = UploadProgress(0, sum(sizes.values()), 0)
        ranges = [(name, begin) for name in sorted(sizes) for begin in range(0, sizes[name], CONTENT_BYTES)]
        for first in range(0, len(ranges), _TOGETHER):
            yield sent
            done_bytes = sent.done_bytes
            new: dict[str, bytes] = {}
            for name, begin in ranges[first : first + _TOGETHER]:
                data = _read_bytes(path / name, begin, min(CONTENT_BYTES, sizes[name] - begin))
                content = Content.of(data)
                files[name].append(content)
                done_bytes += len(data)
                if not self._holds(content, there):
                    new[content.name] = data
            if new:
                self._objects.write(new)
                self._changed -= new.keys()
                there |= {name: len(data) for name, data in new.items()}
            sent = UploadProgress(done_bytes, sent.all_bytes, sent.new_bytes + sum(map(len, new.values())))
        yield sent

    def _holds(self, content: Content, there: Mapping[str, int]) -> bool:
        """Whether the mirror has a content, and it has not changed as far as this process knows."""
        return not lacks([content], there) and content.name not in self._changed

    def _send_packs(
        self, beside: Mapping[str, Path], there: Mapping[str, int], stamps: Mapping[str, Stamp]
    ) -> Iterator[tuple[Pack, int]]:
        """Send the bytes of files that no pack has yet; give all packs, each with the number of bytes sent for it."""
        # A pack needs those before it: if one is gone, all are made anew.
        packs = self._packs if all(self._holds(pack.content, there) for pack in self._packs) else []
        unchanged = {name for name, stamp in stamps.items() if self._stamps.get(name) == stamp}
        kept, new = find_new(beside, packs, unchanged)
        for pack in kept:
            yield pack, 0
        for parts in new:
            pack, data = make_pack(beside, parts)
            self._objects.write({pack.content.name: data})
            self._changed.discard(pack.content.name)
            yield pack, len(data)

    def _has(self, name: str, digest: str, there: Mapping[str, int]) -> bool:
        """Whether the mirror has the whole checkpoint whose manifest has this hash."""
        try:
            found = self._read(name, there)
        except DamagedError:
            return False
        is_intact = self._changed.isdisjoint(content.name for content in found.contents())
        return found.digest == digest and found.is_whole(there) and is_intact

    def _complete(self, name: str, sent: ListedCheckpoint) -> None:
        """Write the list of a checkpoint, if all its contents are there.

        Raises:
            CheckpointError: a rule of a bucket, or another run, has removed some; or another process writes by now.
        """
        there = self._objects.list()
        # Checked again: during a long upload another process may have begun, and have chosen its checkpoint.
        self._check_writer(there)
        if lacks(sent.contents(), there):
            what = "the mirror has lost a part of what was sent"
            hint = "no rule that removes objects, and no other run with this checkpoint.mirror and run.name"
            raise CheckpointError(what, where=f"{self.shown}/{name}", hint=hint)
        if _DESCRIPTION not in there:
            # The store did not answer when the run began.
            self._describe()
        self._objects.write({f"{name}{_LIST}": sent.to_bytes()})

    def prune(self, keep: Keep) -> None:
        """Remove the whole checkpoints that nothing keeps, and then the contents that no list names.

        A damaged checkpoint is removed if it is older than a whole one. A newer list that cannot be read stays, and
        with it all contents, as nobody knows which of them it names.

        Raises:
            CheckpointError: another process writes this mirror by now.
        """
        there = self._objects.list()
        self._check_writer(there)
        lists: dict[str, ListedCheckpoint] = {}
        for name in _names(there):
            try:
                lists[name] = self._read(name, there)
            except DamagedError as error:
                logger.warning("a list of the mirror cannot be used: %s", error)
        whole = {name: one for name, one in lists.items() if one.is_whole(there)}
        best = _find_best(whole)
        kept = keep.choose(list(whole), None if best is None else best.name)
        newest = max(map(step_of, whole), default=-1)
        older = {name for name in _names(there) if step_of(name) < newest}
        removed = (older | whole.keys()) - kept
        self._objects.remove(sorted(f"{name}{_LIST}" for name in removed))
        garbage = {name for name in there if UNFINISHED.fullmatch(name)}
        staying = set(_names(there)) - removed
        if staying <= lists.keys():
            needed = {content.name for name in staying for content in lists[name].contents()}
            garbage |= {name for name in there if name.startswith(CONTENTS)} - needed
        self._objects.remove(sorted(garbage))

    # ---- from the mirror ----

    def best(self, names: Sequence[str]) -> tuple[str, float] | None:
        """Find the checkpoint with the lowest held-out loss among the whole ones of these names.

        Returns:
            Its name and its loss; None: none of them was evaluated.
        """
        there = self._objects.list()
        whole: dict[str, ListedCheckpoint] = {}
        for name in names:
            with suppress(DamagedError):
                listed = self._read(name, there)
                if listed.is_whole(there):
                    whole[name] = listed
        best = _find_best(whole)
        return None if best is None else (best.name, best.loss)

    def fetch(self, name: str, folder: Path) -> Path:
        """Bring a checkpoint into the folder of a run's checkpoints, verified, and give its path there.

        Raises:
            DamagedError: the checkpoint is not whole, or not what was once sent. Nothing of it stays in the folder.
            ResourceError: the disk has no room for it, too.
        """
        there = self._objects.list()
        found = self._read(name, there)
        if not found.is_whole(there):
            raise DamagedError("missing-file", "the mirror lacks a part of it", where=f"{self.shown}/{name}")
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        if found.num_bytes > shutil.disk_usage(folder).free:
            raise no_room(_FULL, folder, found.num_bytes, "another run.dir")
        unfinished = temporary(folder / name)
        with removed_on_failure(unfinished):
            unfinished.mkdir()
            try:
                self._fill(unfinished, found)
            except OSError as error:
                if is_full_disk(error):
                    raise no_room(_FULL, folder, found.num_bytes, "another run.dir") from error
                # Such as a list with a file where another file needs a folder.
                what = "the files of a list cannot be made"
                raise DamagedError("files", what, where=f"{self.shown}/{name}", found=error) from error
            manifest = read_manifest(unfinished)
            if manifest.digest != found.digest or manifest.step != step_of(name):
                raise DamagedError("step", "the mirror has another checkpoint under this name", where=unfinished)
            if found.files.keys() != manifest.files.keys() | {MANIFEST}:
                what = "the list has other files than the checkpoint's manifest"
                raise DamagedError("files", what, where=f"{self.shown}/{name}")
            verify(unfinished)
            move_damaged_aside(folder / name)
            commit(unfinished, folder / name)
        return folder / name

    def fetch_beside(self, name: str, folder: Path, is_expected: Callable[[str], bool] = lambda name: True) -> bool:
        """Bring the files beside a checkpoint into a folder.

        Args:
            name: name of the checkpoint.
            folder: an empty folder.
            is_expected: says whether a file of a name may come.

        Returns:
            Whether there are any files.

        Raises:
            DamagedError: the files are not whole, not what was once sent, or others than those expected.
            ResourceError: the disk has no room for them, too.
        """
        place = f"{self.shown}/{name}"
        packs: list[Pack] = []
        names: set[str] = set()
        there = self._objects.list()
        found = self._read(name, there)
        if lacks(found.packs, there):
            raise DamagedError("missing-file", "the mirror lacks files beside a checkpoint", where=place)
        check_number(len(found.packs), 0, place)
        num_bytes = sum(content.num_bytes for content in found.packs)
        if num_bytes > shutil.disk_usage(folder).free:
            raise no_room(_FULL, folder, num_bytes, "another run.dir")
        for content in found.packs:
            data = self._objects.read(content.name, content.num_bytes)
            if Content.of(data) != content:
                self._changed.add(content.name)
                raise DamagedError("hash", "contents of the mirror have changed", where=place, found=content.name)
            parts: list[Part] = []
            hashes: list[str] = []
            for part, part_data in read_pack(content, data, place, is_expected):
                names.add(part.name)
                check_number(len(found.packs), len(names), place)
                try:
                    write_part(folder, part, part_data)
                except OSError as error:
                    if is_full_disk(error):
                        raise no_room(_FULL, folder, num_bytes, "another run.dir") from error
                    raise DamagedError("files", "a file of a pack cannot be made", where=place, found=error) from error
                parts.append(part)
                hashes.append(xxhash.xxh3_128_hexdigest(part_data))
            packs.append(Pack(content, parts, hashes))
        self._packs, self._stamps = packs, {}
        return bool(packs)

    def _fill(self, unfinished: Path, found: ListedCheckpoint) -> None:
        """Bring the contents of a checkpoint into a folder, several at a time; DamagedError: some have changed."""
        places: list[tuple[Path, int, Content]] = []
        for name, contents in found.files.items():
            path, begin = inside(unfinished, name), 0
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            for content in contents:
                places.append((path, begin, content))
                begin += content.num_bytes

        def bring(path: Path, begin: int, content: Content) -> None:
            data = self._objects.read(content.name, content.num_bytes)
            if Content.of(data) != content:
                # All others are read even so: the next upload mends each content that has changed.
                self._changed.add(content.name)
                return
            self._changed.discard(content.name)
            # With a buffer, which writes all, also where the system takes a part of it at first.
            with path.open("rb+") as file:
                file.seek(begin)
                file.write(data)

        for _ in counted(thread_map(bring, *zip(*places, strict=True)), len(places), "parts"):
            pass
        changed = self._changed & {content.name for content in found.contents()}
        if changed:
            where, what = f"{self.shown}/{min(changed)}", "contents of the mirror have changed"
            raise DamagedError("hash", what, where=where, found=f"{len(changed)} of them")


def _names(there: Mapping[str, int]) -> list[str]:
    """List the names of the checkpoints that have a list among the mirror's objects, the oldest first."""
    names = [name.removesuffix(_LIST) for name in there if name.endswith(_LIST)]
    return sorted((name for name in names if step_of(name) >= 0), key=step_of)


def _find_best(checkpoints: Mapping[str, ListedCheckpoint]) -> _Loss | None:
    """Give the lowest held-out loss; None: none of the checkpoints was evaluated."""
    losses = [_Loss(one.held_out_loss, name) for name, one in checkpoints.items() if one.held_out_loss is not None]
    return min(losses, default=None)


def _read_bytes(path: Path, begin: int, num_bytes: int) -> bytes:
    """Read bytes of a file; DamagedError: it has fewer."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise DamagedError("size", "a file of the checkpoint was cut", where=path)
    return data


def _loss_of(path: Path) -> float | None:
    """Give the held-out loss of a checkpoint of this machine; None: it was not evaluated."""
    loss = read_state(path).get(HELD_OUT_LOSS)
    return float(loss) if isinstance(loss, int | float) else None
