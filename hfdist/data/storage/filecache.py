"""Copies of remote files, shared by all processes of a machine, within a number of bytes.

The locks are the system's, on the files themselves, so that they end with a process however it ends:

    KEY.part    exclusive: somebody fetches it;  free: what a killed process left, removed by the next that fetches
    KEY         shared: somebody reads it;       free: the one that was used longest ago goes when room is needed
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from hfdist.data.storage.network import Network
from hfdist.errors import ResourceError
from hfdist.failures import is_full_disk

logger = logging.getLogger(__name__)


class Fetchable(Protocol):
    """A remote file that the cache can fetch."""

    url: str
    """Address for messages, without secrets."""
    size_bytes: int
    """Size of the whole file."""
    key: str
    """Name of the copy in the cache: another one for each address and version."""

    def fetch_into(self, file: BinaryIO) -> None:
        """Write the whole content from the start of `file` on."""


class FileCache:
    """A folder of copies of remote files on a disk of this machine.

    Args:
        folder: the folder.
        max_bytes: the most bytes of all copies, unless the files that are read at once take more.
        network: the connections to stores, which the files use; None: new ones.
    """

    def __init__(self, folder: Path, max_bytes: int, network: Network | None = None) -> None:
        self.folder = folder
        self.network = network or Network()
        self._files = folder / "files"
        self._max_bytes = max_bytes

    @contextlib.contextmanager
    def fetch(self, remote: Fetchable) -> Iterator[Path]:
        """Give the path of a whole copy, fetched if it is not here, that stays at least as long as the context.

        DataError: the file cannot be fetched, or has changed. ResourceError: the file is larger than the cache, or the
        disk is full.
        """
        if remote.size_bytes > self._max_bytes:
            raise ResourceError(
                "a file is larger than the cache",
                where=remote.url,
                found=f"{remote.size_bytes} bytes; data.file_cache_bytes={self._max_bytes}",
                hint=f"data.file_cache_bytes={remote.size_bytes} or more",
            )
        self._files.mkdir(parents=True, exist_ok=True)
        path = self._files / remote.key
        descriptor = None
        # Another process may evict the copy before it is pinned, or give up its own fetch: then all begins anew.
        while descriptor is None:
            descriptor = self._pin(path, remote)
            if descriptor is None:
                descriptor = self._download(path, remote)
        try:
            # The time of the last use, for the eviction. Not the system's own stamp, which may lag by milliseconds.
            # Another user's copy keeps its time.
            with contextlib.suppress(PermissionError):
                os.utime(descriptor, ns=(time.time_ns(), time.time_ns()))
            yield path
        finally:
            os.close(descriptor)

    def _pin(self, path: Path, remote: Fetchable) -> int | None:
        """Open the copy and lock it against eviction; None: there is no copy, or a damaged one, which is removed."""
        descriptor = _lock(path, fcntl.LOCK_SH, os.O_RDONLY)
        if descriptor is None:
            return None
        if os.fstat(descriptor).st_size != remote.size_bytes:
            logger.warning("%s: the copy in the cache is damaged, and is fetched again", remote.url)
            path.unlink(missing_ok=True)
            os.close(descriptor)
            return None
        return descriptor

    def _download(self, path: Path, remote: Fetchable) -> int | None:
        """Fetch into a new file, and give it open and pinned; None: another process has fetched it, or has given up."""
        part = path.with_name(f"{path.name}.part")
        descriptor = _lock(part, fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_RDWR | os.O_CREAT)
        if descriptor is None:
            # Another process fetches it: this lock comes when that one has ended.
            other = _lock(part, fcntl.LOCK_SH, os.O_RDONLY)
            if other is not None:
                os.close(other)
            return None
        if path.exists():
            # Another process has completed it after `_pin` had looked, and before this lock.
            part.unlink()
            os.close(descriptor)
            return None
        try:
            self._make_room(descriptor, remote)
            # The lock ends when the last descriptor of this opening is closed.
            with os.fdopen(os.dup(descriptor), "r+b") as file:
                remote.fetch_into(file)
                file.flush()
                os.fsync(descriptor)
            os.rename(part, path)
            # The lock changes in two steps: another process may lock, and evict, in between. It is then fetched again.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not _is_there(descriptor, path):
                os.close(descriptor)
                return None
        except BaseException as error:
            part.unlink(missing_ok=True)
            os.close(descriptor)
            if is_full_disk(error):
                raise self._no_space(remote) from error
            raise
        return descriptor

    def _make_room(self, descriptor: int, remote: Fetchable) -> None:
        """Evict copies until `remote` fits, and let its new file count with its whole size from now on.

        ResourceError: the disk has too little space.
        """
        with _locked(self.folder / "evict.lock"):
            os.ftruncate(descriptor, 0)
            files = []
            for entry in os.scandir(self._files):
                with contextlib.suppress(FileNotFoundError):
                    files.append((entry.stat(), Path(entry)))
            total_bytes = remote.size_bytes + sum(status.st_size for status, _ in files)
            # Parts that nobody is fetching go first, whether there is room or not.
            parts = [file for file in files if file[1].suffix == ".part"]
            copies = [file for file in files if file[1].suffix != ".part"]
            for status, path in parts:
                if _remove_unless_locked(path):
                    total_bytes -= status.st_size
            for status, path in sorted(copies, key=lambda file: file[0].st_mtime_ns):
                if total_bytes > self._max_bytes and _remove_unless_locked(path):
                    total_bytes -= status.st_size
            if total_bytes > self._max_bytes:
                logger.warning(
                    "the files that are read at once take %d bytes, more than data.file_cache_bytes=%d",
                    total_bytes,
                    self._max_bytes,
                )
            if shutil.disk_usage(self._files).free < remote.size_bytes:
                raise self._no_space(remote)
            os.ftruncate(descriptor, remote.size_bytes)

    def _no_space(self, remote: Fetchable) -> ResourceError:
        free_bytes = shutil.disk_usage(self._files).free
        return ResourceError(
            "no space on the disk for a copy",
            where=remote.url,
            found=f"{remote.size_bytes} bytes needed, {free_bytes} free in {self._files}",
            hint="free some, lower data.file_cache_bytes, or data.cache_dir=... on another disk",
        )


def _lock(path: Path, operation: int, flags: int) -> int | None:
    """Open a file and lock it, and give its descriptor.

    None: the file is not there, was removed or renamed meanwhile, or is locked and LOCK_NB asks not to wait.
    """
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, operation)
        if _is_there(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_unless_locked(path: Path) -> bool:
    """Remove a file that nobody fetches or reads; whether it was removed."""
    descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_RDONLY)
    if descriptor is None:
        return False
    path.unlink(missing_ok=True)
    os.close(descriptor)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
