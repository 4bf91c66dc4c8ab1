"""Files here or on a network: found by pattern, read whole or in parts, identified, and hashed part by part."""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import json
import logging
import os
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote

import numpy as np
import xxhash
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from numpy.typing import NDArray

from hfdist.atomic_write import write_atomically
from hfdist.config.checks.urls import check_address, redact, scheme_of, without_query
from hfdist.config.paths import expand_user
from hfdist.data.cache import cached_array
from hfdist.data.storage.conversion import SUFFIXES as OTHER_SUFFIXES
from hfdist.data.storage.conversion import hint_for
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.network import Details, RangeError, details_in
from hfdist.errors import ConfigError, DataError
from hfdist.units import count

logger = logging.getLogger(__name__)

# Read of each end for the identity, and at least of a remote file, so that the identity and the footer of a table take
# one request each.
SAMPLE_BYTES = 1 << 16
_FETCHED_BYTES = 16 << 20


class DataFile(ABC):
    """A file that is read, never written. Usable in forked processes: nothing open is kept."""

    url: str
    """The address as it is shown to people: without user, password or signed query."""
    name: str
    """Path relative to the source."""
    size_bytes: int
    version: str
    """Changes with the content, as far as the store tells without reading: time of change, ETag, ..."""
    key: str
    """A file name, made of address, version and all else that this machine knows of it."""
    contents: NDArray[np.uint64] | None = None
    """Hashes of its parts, once they are known: see `read_contents`."""

    @abstractmethod
    def local(self) -> AbstractContextManager[Path]:
        """Give the whole file on this machine, fetched where it is not yet, and kept from eviction inside the context.

        DataError: it cannot be fetched, or has changed since it was found, even while it was read.
        """

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open it for seeking and reading parts, such as a footer, without fetching the whole.

        DataError: see `local`; later reads raise OSError.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Compare size and version with those that were found at first; DataError where they are others."""


class LocalFile(DataFile):
    """A file on this machine, read where it is; DataError where it is not there."""

    def __init__(self, path: Path, name: str) -> None:
        self.url, self.name, self._path = str(path), name, path
        status = self._status()
        self.size_bytes, self.version = status.st_size, str(status.st_mtime_ns)
        self.changed_ns = status.st_ctime_ns
        """Time of the last change of any kind; unlike `version`, nobody can set it back."""
        known = [str(path.absolute()), self.size_bytes, self.version, self.changed_ns, status.st_ino]
        self.key = hashlib.blake2b(json.dumps(known).encode(), digest_size=20).hexdigest()

    @contextmanager
    def local(self) -> Iterator[Path]:
        """Give the path itself."""
        # Before, too: a mapped file that has become shorter ends the process.
        self.check_unchanged()
        try:
            yield self._path
        finally:
            self.check_unchanged()

    def open(self) -> BinaryIO:
        """Open it for reading."""
        try:
            return self._path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from error

    def check_unchanged(self) -> None:
        """Compare size and time of change."""
        status = self._status()
        if (status.st_size, str(status.st_mtime_ns)) != (self.size_bytes, self.version):
            raise _changed(self)

    def _status(self) -> os.stat_result:
        try:
            return self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"cannot be read: {error.strerror}", where=self.url)


class RemoteFile(DataFile):
    """A file on a network, read in ranges, or fetched as a whole into the cache of this machine.

    `address` is the whole URL with its query, and `cache` holds the connections, too.
    """

    def __init__(self, address: str, name: str, details: Details, cache: FileCache) -> None:
        self.url, self.name = redact(address), name
        self.size_bytes, self.version = details
        # A hash: nothing in an address can lead out of the cache's folder.
        self.key = key_of(address, self.version, str(self.size_bytes))
        self.cache = cache
        self._address, self._network = address, cache.network

    def local(self) -> AbstractContextManager[Path]:
        """Give a copy in the cache, of the version that was found."""
        return self.cache.fetch(self)

    def open(self) -> BinaryIO:
        """Open it for reading parts, each a request, 64 KiB at least."""
        self.check_unchanged()
        return self._open_unchecked()

    def check_unchanged(self) -> None:
        """Ask for size and version again."""
        if self._network.details(self._address) != (self.size_bytes, self.version):
            raise _changed(self)

    def fetch_into(self, file: BinaryIO) -> None:
        """Write the whole content from the start of `file` on; DataError where it has changed or is out of reach."""
        self.check_unchanged()
        try:
            for start in range(0, self.size_bytes, _FETCHED_BYTES):
                file.write(self._read_range(start, min(start + _FETCHED_BYTES, self.size_bytes)))
        except RangeError:
            self._network.retries.run(lambda: self._fetch_whole(file), self._address)
        # What was read in between is one file, and not parts of two.
        self.check_unchanged()

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to before `stop`; from a fetched copy where the server has no ranges."""
        try:
            return self._read_range(start, stop)
        except RangeError:
            with self.local() as path, path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

    def _open_unchecked(self) -> BinaryIO:
        # Asking whether it has changed takes a request.
        return cast(BinaryIO, io.BufferedReader(_RangeReader(self), SAMPLE_BYTES))

    def _read_range(self, start: int, stop: int) -> bytes:
        def read() -> bytes:
            data = self._network.read_range(self._address, start, stop, self.size_bytes)
            self._check_length(len(data), stop - start)
            return data

        return self._network.retries.run(read, self._address)

    def _fetch_whole(self, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate()
        self._network.read_whole(self._address, file)
        self._check_length(file.tell(), self.size_bytes)

    def _check_length(self, found: int, promised: int) -> None:
        if found != promised:
            self.check_unchanged()
            raise EOFError(f"{found} of {promised} bytes arrived")


class _RangeReader(AbstractBufferedFile):
    """A remote file as fsspec reads it, but with our retries, and with errors as Arrow expects them."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        super().__init__(None, file.url, cache_type="none", size=file.size_bytes)

    def seek(self, loc: int, whence: int = 0) -> int:
        """Move as any file does: to a place before the start, which a damaged file may name, is an OSError."""
        try:
            return cast(int, super().seek(loc, whence))
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error

    def _fetch_range(self, start: int, end: int) -> bytes:
        try:
            return self._file.read_range(start, min(end, self._file.size_bytes))
        except DataError as error:
            raise OSError(errno.EIO, f"{error.what}: {error.where}") from error


def key_of(*parts: str) -> str:
    """Hash of an address and what else tells a copy apart; a file name."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


def _changed(file: DataFile) -> DataError:
    hint = "put the old file back, or start a new run (run.name=...)"
    return DataError("has changed since the run began", where=file.url, hint=hint)


def identify_all(files: Sequence[DataFile], column: str) -> list[str]:
    """Identify files, several at once: see `identify`."""
    return list(thread_map(lambda file: identify(file, column), files))


def identify(file: DataFile, column: str) -> str:
    """Hash of a file's size, of its first and last 64 KiB, and of the column that is read from it.

    It is the same for a copy on another machine: times are not part of it. What lies between the ends is for
    `read_contents`. That of a remote file is kept under its address and version, so that the next run asks nothing.
    DataError where it cannot be read.
    """
    if not isinstance(file, RemoteFile):
        return _digest(file, file.open, column)
    name = hashlib.blake2b(f"{file.key}:{column}".encode(), digest_size=20).hexdigest()
    kept = file.cache.folder / "identities" / name
    if kept.exists():
        return kept.read_text()
    identity = _digest(file, file._open_unchecked, column)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, identity.encode())
    return identity


def _digest(file: DataFile, open_file: Callable[[], BinaryIO], column: str) -> str:
    digest = hashlib.blake2b(f"{file.size_bytes}:{column}:".encode(), digest_size=12)
    try:
        with open_file() as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, file.size_bytes - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file.url) from error
    return digest.hexdigest()


Contents = NDArray[np.uint64]
"""XXH3 of each part, in order; the same on every machine. Shape [parts]."""

# The largest size of all files of a source that is read at a start: a minute of a disk that gives 1 GB/s.
MOST_BYTES = 64 << 30
_LEAST_PART_BYTES, _LEAST_PART_ROWS, _MOST_PARTS = 1 << 12, 1 << 4, 1 << 10
_READ_BYTES = 1 << 22
# A file that was changed so lately could be changed once more without another time of change.
_RECENT_NS = 2 * 10**9


def part_bytes(size_bytes: int) -> int:
    """Size of each part but the last of a file: a power of two, 4 KiB at least, so that there are 1024 at the most."""
    return _part_size(size_bytes, _LEAST_PART_BYTES)


def part_rows(num_rows: int) -> int:
    """The same of rows, 16 at least."""
    return _part_size(num_rows, _LEAST_PART_ROWS)


def _part_size(size: int, least: int) -> int:
    return max(least, 1 << (max(size - 1, 1) // _MOST_PARTS).bit_length())


def digests_of(contents: Contents | None) -> list[str]:
    """One hash of all parts; none where they are not known."""
    return [] if contents is None else [xxhash.xxh3_128(contents.astype("<u8").tobytes()).hexdigest()]


def is_in_identity(file: DataFile) -> bool:
    """Whether the identity of a file is of all that it holds."""
    return file.size_bytes <= 2 * SAMPLE_BYTES


def read_contents(files: Sequence[DataFile], folder: Path) -> None:
    """Set `contents` of files, several at once; not of remote ones whose identity is of all that they hold.

    The files are local, or fetched whole at a start anyway. What was found of a large one is kept on this machine under
    its `key`, so that a second start reads nothing. DataError where one cannot be read, or has changed.
    """

    def read(file: DataFile) -> Contents:
        if is_in_identity(file):
            return _hash_parts(file)
        changed_ns = file.changed_ns if isinstance(file, LocalFile) else 0
        return cached_contents(file.key, folder, lambda: _hash_parts(file), changed_ns=changed_ns)

    read_here = [file for file in files if isinstance(file, LocalFile) or not is_in_identity(file)]
    for file, contents in zip(read_here, thread_map(read, read_here), strict=True):
        file.contents = contents


def cached_contents(key: str, folder: Path, make: Callable[[], Contents], *, changed_ns: int) -> Contents:
    """Load hashes that are kept under `key`, or make them; those of a file that was changed just now are not kept."""
    is_old = time.time_ns() - changed_ns > _RECENT_NS
    return cached_array(folder / "contents" / f"{key}.npy", make, keep=is_old)


def _hash_parts(file: DataFile) -> Contents:
    size = part_bytes(file.size_bytes)
    hashes = []
    with file.local() as path, path.open("rb") as opened:
        for start in range(0, file.size_bytes, size):
            hashed, left = xxhash.xxh3_64(), min(size, file.size_bytes - start)
            while left and (piece := opened.read(min(left, _READ_BYTES))):
                hashed.update(piece)
                left -= len(piece)
            hashes.append(hashed.intdigest())
    return np.array(hashes, dtype=np.uint64)


T = TypeVar("T")

_THREADS = 16
# Passing a chunk to a thread costs as much as opening a local file.
_CHUNKS_A_THREAD, _LARGEST_CHUNK = 8, 16


def thread_map(function: Callable[..., T], *columns: Sequence[object]) -> Iterator[T]:
    """Give what `function` gives for each item, in order, as `map` does; what it raises is raised."""
    is_over = threading.Event()

    def run(chunk: Sequence[tuple[object, ...]]) -> list[T]:
        # Else an error would wait for whole chunks, which may be files to fetch.
        return [function(*item) for item in chunk if not is_over.is_set()]

    items = list(zip(*columns, strict=True))
    length = min(max(len(items) // (_THREADS * _CHUNKS_A_THREAD), 1), _LARGEST_CHUNK)
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for results in pool.map(run, (items[start : start + length] for start in range(0, len(items), length))):
            yield from results
    finally:
        is_over.set()
        # No wait: after an error, the garbage collector may come here in one of these threads.
        pool.shutdown(wait=False, cancel_futures=True)


# Folders of an index page that links to itself have no end.
_DEEPEST_FOLDER = 16


def find_files(path: str, *, key: str, suffixes: tuple[str, ...], cache: FileCache) -> list[DataFile]:
    """Find what `path` names: a file, a folder with all below it, or a glob; here, or at a URL.

    Names are relative to the folder, or to the part of a glob without wildcards, so that a corpus may move. Links are
    followed. Hidden folders, and files in a folder without one of the suffixes, are left out.

    Raises:
        ConfigError: for `key`: no such file, a kind that cannot be read, an address with a secret.
        DataError: the store does not answer.
    """
    scheme = scheme_of(path)
    if scheme is not None:
        check_address(path, key=key)
    files: Sequence[DataFile]
    if scheme is None or scheme == "file":
        here = expand_user(path if scheme is None else unquote(path[len("file://") :]))
        _refuse_splits(here, key)
        found = _find_local(here, ("",))
        files = [file for file in found if file.name.endswith(suffixes)] if here.is_dir() else found
        if files and len(files) < len(found):
            others_here = [file.name for file in found if not file.name.endswith(suffixes)]
            other = next((name for name in others_here if name.endswith(OTHER_SUFFIXES)), others_here[0])
            num_others = len(found) - len(files)
            logger.warning("%s: files of other kinds are left out: %d, such as %s", key, num_others, other)
    else:
        files = _find_remote(path, suffixes, cache, key)
    if not files:
        there = [] if scheme else _find_local(expand_user(path), ("",))
        names = f", with {count(len(there), 'file')}, such as {there[0].name}" if there else ""
        raise ConfigError(
            "no file of a kind that can be read is there" if there else "no file is there",
            where=key,
            found=redact(path) if scheme else f"{expand_user(path)}{names}",
            allowed=f"a file, a folder, or a glob (quote it) of {', '.join(suffixes)}",
            hint=hint_for([Path(file.url) for file in there], path, key),
        )
    for file in files:
        if not file.name.endswith(suffixes):
            raise ConfigError(
                "a kind of file that cannot be read",
                where=key,
                found=file.url,
                allowed=", ".join(suffixes),
                hint=None if scheme else hint_for([Path(one.url) for one in files], path, key),
            )
        if isinstance(file, LocalFile) and not os.access(file.url, os.R_OK):
            raise ConfigError("the file cannot be read: permission denied", where=key, found=file.url)
    return sorted(files, key=lambda file: file.name)


def _refuse_splits(folder: Path, key: str) -> None:
    """Refuse what a DatasetDict has saved: its splits are not for training alike."""
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if len(splits) > 1 and (folder / "dataset_dict.json").is_file():
        wanted = ("validation", "test", "train") if ".eval_sources." in f"{key}." else ("train",)
        first = next((name for name in wanted if name in splits), splits[0])
        what, allowed = "this folder holds several splits, and they are not meant alike", "the folder of one split"
        hint = shlex.quote(f"{key}={folder / first}")
        raise ConfigError(what, where=key, found=", ".join(splits), allowed=allowed, hint=hint)


def _find_local(pattern: Path, suffixes: tuple[str, ...]) -> list[LocalFile]:
    if pattern.is_dir():
        root = pattern
        below = [path / name for path, names in _folders_below(root) for name in names if name.endswith(suffixes)]
        paths = [path for path in below if not _is_hidden(path.name)]
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parent.parts))
        paths = list(_glob(pattern))
    # Some writers name folders like files.
    return [LocalFile(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]


def _glob(pattern: Path) -> dict[Path, None]:
    """Expand a glob as `glob.glob` does, but for `**`: see `_folders_below`."""
    parts = pattern.parts
    if "**" not in parts:
        return dict.fromkeys(map(Path, glob.glob(str(pattern))))
    place = parts.index("**")
    rest = parts[place + 1 :] or ("*",)
    tops = _glob(Path(*parts[:place]))
    folders = [glob.escape(str(folder)) for top in tops if top.is_dir() for folder, _ in _folders_below(top)]
    return {path: None for folder in folders for path in _glob(Path(folder, *rest))}


def _folders_below(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Find the folders below one, and itself, with the names of their files; hidden folders are left out.

    Links to folders are followed, wherever they lead: whoever has laid out the folder has put them there. Each folder
    is found once, under a name without links or else the first, so links that lead back or to one place have an end.
    """
    seen: set[tuple[int, int]] = set()
    tops = [top]
    while tops:
        links: list[Path] = []
        for one in tops:
            for place, folders, names in os.walk(one, onerror=_refuse_folder):
                status = os.stat(place)
                if (status.st_dev, status.st_ino) in seen:
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                folders[:] = [name for name in folders if not _is_hidden(name)]
                links += [path for path in (Path(place, name) for name in folders) if path.is_symlink()]
                yield Path(place), names
        tops = sorted(links)


def _refuse_folder(error: OSError) -> None:
    """Raise a DataError: a folder that cannot be listed would be left out of the data in silence."""
    if os.path.basename(error.filename) == "lost+found":
        # Of the file system, at the top of a disk.
        return
    what, hint = f"a folder of the data cannot be read: {error.strerror}", "the right to list it, or a glob without it"
    raise DataError(what, where=str(error.filename), hint=hint) from error


def _find_remote(address: str, suffixes: tuple[str, ...], cache: FileCache, key: str) -> list[RemoteFile]:
    is_web = scheme_of(address) in ("http", "https")
    plain = without_query(address) if is_web else address
    is_glob = glob.has_magic(plain)
    if not is_glob and plain.endswith(suffixes):
        info = cache.network.ask(address, lambda store: store.info(address))
        # Some writers name folders like files.
        if info["type"] == "file":
            return [RemoteFile(address, _unquoted(plain, is_web).rpartition("/")[2], details_in(info, address), cache)]
    root = "/".join(takewhile(lambda part: not glob.has_magic(part), plain.split("/"))) if is_glob else plain
    # fsspec leaves out folders of index pages that give no answer, unless told to raise.
    strict = {"on_error": "raise", "maxdepth": _DEEPEST_FOLDER} if is_web else {}

    def listing(store: AbstractFileSystem) -> dict[str, dict[str, Any]]:
        found = store.glob(plain, detail=True, **strict) if is_glob else store.find(plain, detail=True, **strict)
        start = store._strip_protocol(root).rstrip("/") + "/"
        # The shortest address first: an index page may name a file twice, with and without a query.
        return {
            store.unstrip_protocol(path): {**info, "name": _unquoted(path.removeprefix(start), is_web)}
            for path, info in sorted(found.items())
            if info["type"] == "file" and (is_glob or without_query(path).endswith(suffixes))
        }

    names: dict[str, str] = {}
    infos = cache.network.ask(address, listing)
    for url, info in infos.items():
        if not _is_hidden(info["name"]):
            _check_name(info["name"], redact(url), key)
            names.setdefault(info["name"], url)

    def open_file(name: str) -> RemoteFile:
        url = names[name]
        # An index page tells no sizes.
        details = cache.network.details(url) if is_web else details_in(infos[url], url)
        return RemoteFile(url, name, details, cache)

    return list(thread_map(open_file, list(names)))


def _unquoted(path: str, is_web: bool) -> str:
    # So that a file has one name here and at a web server.
    return unquote(without_query(path)) if is_web else path


def _is_hidden(name: str) -> bool:
    # Caches and checkpoints of notebooks; and `..`, which a listing may hold.
    return any(part.startswith(".") for part in name.split("/"))


def _check_name(name: str, url: str, key: str) -> None:
    if not name.isprintable() or "\\" in name:
        raise DataError("a listing holds a file name with control characters", where=f"{key}, {url}", found=name)
