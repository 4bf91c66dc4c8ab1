"""Which files a path, a glob or an address names, here or on a network."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fsspec.spec import AbstractFileSystem

from hfdist.config.checks.urls import check_address, redact, scheme_of, without_query
from hfdist.config.override_text import in_shell
from hfdist.config.paths import expand_user
from hfdist.data.storage.conversion import SUFFIXES as OTHER_SUFFIXES
from hfdist.data.storage.conversion import hint_for
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile, LocalFile, RemoteFile
from hfdist.data.storage.network import details_in
from hfdist.data.threads import thread_map
from hfdist.errors import ConfigError, DataError
from hfdist.units import count

logger = logging.getLogger(__name__)

_DEEPEST_FOLDER = 16
"""Level of the deepest folder of a web server that is read: an index page that links to itself has no end."""


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
    if scheme is None:
        files = _find_here(expand_user(path), path, key, suffixes)
    elif scheme == "file":
        given = unquote(path[len("file://") :])
        files = _find_here(expand_user(given), given, key, suffixes)
    else:
        files = _find_remote(path, suffixes, cache, key)
        if not files:
            raise ConfigError("no file is there", where=key, found=redact(path), allowed=_allowed(suffixes))
        _check_kinds(files, key, suffixes)
    return sorted(files, key=lambda file: file.name)


def root_of(path: str) -> str:
    """Give the folder or the address, without a slash at its end, to which the names of `find_files` are relative."""
    scheme = scheme_of(path)
    if scheme in (None, "file"):
        local = expand_user(path if scheme is None else unquote(path[len("file://") :]))
        return str(local if local.is_dir() else _root_here(local))
    plain = without_query(path) if scheme in ("http", "https") else path
    return _root_there(plain).rstrip("/")


def _root_here(pattern: Path) -> Path:
    """Give the folder of a file, or that of a glob without its wildcards."""
    return pattern.parent if pattern.is_file() else Path(*takewhile(_is_plain, pattern.parent.parts))


def _root_there(plain: str) -> str:
    return "/".join(takewhile(_is_plain, plain.split("/"))) if glob.has_magic(plain) else plain


def _is_plain(part: str) -> bool:
    return not glob.has_magic(part)


def _find_here(path: Path, given: str, key: str, suffixes: tuple[str, ...]) -> list[LocalFile]:
    """Find files on this machine; `given` is what hints name in place of `path`, as the user wrote it."""
    _refuse_splits(path, key)
    found = _find_local(path)
    if not found:
        raise ConfigError("no file is there", where=key, found=str(path), allowed=_allowed(suffixes))
    if path.is_dir():
        files = _of_kinds(found, path, given, key, suffixes)
    else:
        files = found
        _check_kinds(files, key, suffixes, hint=lambda: hint_for([Path(file.url) for file in files], given, key))
    for file in files:
        if not os.access(file.url, os.R_OK):
            raise ConfigError("the file cannot be read: permission denied", where=key, found=file.url)
    return files


def _of_kinds(
    found: Sequence[LocalFile], folder: Path, given: str, key: str, suffixes: tuple[str, ...]
) -> list[LocalFile]:
    """Leave out the files of a folder that are of other kinds, with a warning; ConfigError: all are."""
    files = [file for file in found if file.name.endswith(suffixes)]
    others = [file.name for file in found if not file.name.endswith(suffixes)]
    if not files:
        raise ConfigError(
            "no file of a kind that can be read is there",
            where=key,
            found=f"{folder}, with {count(len(found), 'file')}, such as {others[0]}",
            allowed=_allowed(suffixes),
            hint=hint_for([Path(file.url) for file in found], given, key),
        )
    if others:
        shown = next((name for name in others if name.endswith(OTHER_SUFFIXES)), others[0])
        logger.warning("%s: files of other kinds are left out: %d, such as %s", key, len(others), shown)
    return files


def _check_kinds(
    files: Sequence[DataFile], key: str, suffixes: tuple[str, ...], *, hint: Callable[[], str | None] = lambda: None
) -> None:
    """Raise a ConfigError on a file of another kind; `hint` looks at all files, so it is asked only then."""
    for file in files:
        if not file.name.endswith(suffixes):
            what, allowed = "a kind of file that cannot be read", ", ".join(suffixes)
            raise ConfigError(what, where=key, found=file.url, allowed=allowed, hint=hint())


def _allowed(suffixes: tuple[str, ...]) -> str:
    return f"a file, a folder, or a glob (quote it) of {', '.join(suffixes)}"


def _refuse_splits(folder: Path, key: str) -> None:
    """Refuse what a DatasetDict has saved: its splits are not for training alike."""
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if len(splits) > 1 and (folder / "dataset_dict.json").is_file():
        wanted = ("validation", "test", "train") if ".eval_sources." in f"{key}." else ("train",)
        first = next((name for name in wanted if name in splits), splits[0])
        what, allowed = "this folder holds several splits, and they are not meant alike", "the folder of one split"
        hint = in_shell(key, str(folder / first))
        raise ConfigError(what, where=key, found=", ".join(splits), allowed=allowed, hint=hint)


def _find_local(pattern: Path) -> list[LocalFile]:
    if pattern.is_dir():
        root = pattern
        below = [path / name for path, names in _folders_below(root) for name in names]
        paths = [path for path in below if not _is_hidden(path.name)]
    elif pattern.is_file():
        # Its own name may hold what a glob means otherwise.
        root, paths = _root_here(pattern), [pattern]
    else:
        root, paths = _root_here(pattern), list(_glob(pattern))
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
        # The file system made this folder, at the top of a disk.
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
    root = _root_there(plain)
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
    """Give a path without the `%20` of a web server, so that a file has one name here and there."""
    return unquote(without_query(path)) if is_web else path


def _is_hidden(name: str) -> bool:
    """Whether a path is hidden, as caches and checkpoints of notebooks are, or leads up, as `..` in a listing does."""
    return any(part.startswith(".") for part in name.split("/"))


def _check_name(name: str, url: str, key: str) -> None:
    if not name.isprintable() or "\\" in name:
        raise DataError("a listing holds a file name with control characters", where=f"{key}, {url}", found=name)
