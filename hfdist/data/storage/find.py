"""The files that a path, a glob or an address names, on this machine or on a network."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
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
    if scheme_of(path) is not None:
        check_address(path, key=key)
    local = _local_path(path)
    files: Sequence[DataFile]
    if local is None:
        files = _find_remote(_Search(path, key, suffixes), cache)
    else:
        files = _find_here(_Search(local, key, suffixes))
    return sorted(files, key=lambda file: file.name)


def root_of(path: str) -> str:
    """Give the folder or the address, without a slash at its end, to which the names of `find_files` are relative."""
    local = _local_path(path)
    if local is None:
        return _root_there(_without_web_query(path)).rstrip("/")
    folder = expand_user(local)
    return str(folder if folder.is_dir() else _root_here(folder))


@dataclass(frozen=True)
class _Search:
    """What is looked for, and in whose name messages speak."""

    given: str
    """A path or a glob of this machine, or an address, as the user wrote it."""
    key: str
    """The config key whose value it is."""
    suffixes: tuple[str, ...]
    """Ends of the names of files that can be read."""

    @property
    def allowed(self) -> str:
        """What the key takes, in words."""
        return f"a file, a folder, or a glob (quote it) of {', '.join(self.suffixes)}"


def _local_path(path: str) -> str | None:
    """Give the path on this machine that `path` is, or names as `file://...`; None: it is an address of a network."""
    scheme = scheme_of(path)
    if scheme is None:
        return path
    return unquote(path[len("file://") :]) if scheme == "file" else None


def _is_web(address: str) -> bool:
    return scheme_of(address) in ("http", "https")


def _without_web_query(address: str) -> str:
    """Give an address as a glob reads it: in that of a web server, `?` begins a query and is no wildcard."""
    return without_query(address) if _is_web(address) else address


def _root_here(pattern: Path) -> Path:
    """Give the folder of a file, or that of a glob without its wildcards."""
    return pattern.parent if pattern.is_file() else Path(*takewhile(_is_plain, pattern.parent.parts))


def _root_there(plain: str) -> str:
    """Give an address without a query as it is, or that of a glob up to its first wildcard."""
    return "/".join(takewhile(_is_plain, plain.split("/"))) if glob.has_magic(plain) else plain


def _is_plain(part: str) -> bool:
    return not glob.has_magic(part)


def _find_here(search: _Search) -> list[LocalFile]:
    """Find files on this machine; ConfigError: there is none, or one that cannot be read."""
    path = expand_user(search.given)
    _refuse_splits(path, search.key)
    found = _find_local(path)
    if not found:
        raise ConfigError("no file is there", where=search.key, found=str(path), allowed=search.allowed)
    if path.is_dir():
        files = _leave_out_others(found, path, search)
    else:
        files = found
        _check_kinds(files, search, hint=lambda: _hint_for_kinds(files, search))
    for file in files:
        if not os.access(file.url, os.R_OK):
            raise ConfigError("the file cannot be read: permission denied", where=search.key, found=file.url)
    return files


def _leave_out_others(found: Sequence[LocalFile], folder: Path, search: _Search) -> list[LocalFile]:
    """Leave out the files of a folder that are of other kinds, with a warning; ConfigError: all are."""
    files = [file for file in found if file.name.endswith(search.suffixes)]
    others = [file.name for file in found if not file.name.endswith(search.suffixes)]
    if not files:
        raise ConfigError(
            "no file of a kind that can be read is there",
            where=search.key,
            found=f"{folder}, with {count(len(found), 'file')}, such as {others[0]}",
            allowed=search.allowed,
            hint=_hint_for_kinds(found, search),
        )
    if others:
        # Data of a kind that could be converted is a likelier mistake than a README.
        shown = next((name for name in others if name.endswith(OTHER_SUFFIXES)), others[0])
        logger.warning("%s: files of other kinds are left out: %d, such as %s", search.key, len(others), shown)
    return files


def _hint_for_kinds(files: Sequence[LocalFile], search: _Search) -> str | None:
    """Say what to do with files of other kinds; None: nothing is known for them."""
    return hint_for([Path(file.url) for file in files], search.given, search.key)


def _check_kinds(files: Sequence[DataFile], search: _Search, *, hint: Callable[[], str | None] = lambda: None) -> None:
    """Raise a ConfigError on a file of another kind; `hint` looks at all files, so it is asked only then."""
    for file in files:
        if not file.name.endswith(search.suffixes):
            what, allowed = "a kind of file that cannot be read", ", ".join(search.suffixes)
            raise ConfigError(what, where=search.key, found=file.url, allowed=allowed, hint=hint())


def _refuse_splits(folder: Path, key: str) -> None:
    """Refuse what a DatasetDict has saved: its splits are not for training alike."""
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if len(splits) > 1 and (folder / "dataset_dict.json").is_file():
        is_held_out = ".eval_sources." in f"{key}."
        wanted = ("validation", "test", "train") if is_held_out else ("train",)
        first = next((name for name in wanted if name in splits), splits[0])
        what, allowed = "this folder holds several splits, and they are not meant alike", "the folder of one split"
        hint = in_shell(key, str(folder / first))
        raise ConfigError(what, where=key, found=", ".join(splits), allowed=allowed, hint=hint)


def _find_local(pattern: Path) -> list[LocalFile]:
    """List the files of a folder, of all kinds, or those of a glob, or one file; empty: there is none."""
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
    """Expand a glob as `glob.glob` does, but `**` follows links to folders, too; keys are paths, each one once."""
    parts = pattern.parts
    if "**" not in parts:
        return dict.fromkeys(map(Path, glob.glob(str(pattern))))
    stars = parts.index("**")
    rest = parts[stars + 1 :] or ("*",)
    tops = _glob(Path(*parts[:stars]))
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
        for start in tops:
            for folder, subfolders, names in os.walk(start, onerror=_refuse_folder):
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in seen:
                    # `os.walk` goes into what is left in this list.
                    subfolders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                subfolders[:] = [name for name in subfolders if not _is_hidden(name)]
                paths = [Path(folder, name) for name in subfolders]
                links += [path for path in paths if path.is_symlink()]
                yield Path(folder), names
        tops = sorted(links)


def _refuse_folder(error: OSError) -> None:
    """Raise a DataError: a folder that cannot be listed would be left out of the data in silence."""
    if os.path.basename(error.filename) == "lost+found":
        # The file system made this folder, at the top of a disk.
        return
    what, hint = f"a folder of the data cannot be read: {error.strerror}", "the right to list it, or a glob without it"
    raise DataError(what, where=str(error.filename), hint=hint) from error


def _find_remote(search: _Search, cache: FileCache) -> list[RemoteFile]:
    """Find files at an address; ConfigError: there is none, or one of another kind; DataError: no answer comes."""
    files = _find_one(search, cache) or _find_listed(search, cache)
    if not files:
        raise ConfigError("no file is there", where=search.key, found=redact(search.given), allowed=search.allowed)
    _check_kinds(files, search)
    return files


def _find_one(search: _Search, cache: FileCache) -> list[RemoteFile]:
    """Give the one file that an address names; empty: it is a glob or a folder."""
    address = search.given
    plain = _without_web_query(address)
    if glob.has_magic(plain) or not plain.endswith(search.suffixes):
        return []
    info = cache.network.ask(address, lambda store: store.info(address))
    # Some writers name folders like files.
    if info["type"] != "file":
        return []
    name = _unquoted(plain, is_web=_is_web(address)).rpartition("/")[2]
    return [RemoteFile(address, name, details_in(info, address), cache)]


class _Listed(NamedTuple):
    """A file in the listing of a store."""

    url: str
    name: str
    """Its path, relative to the folder or to the part of the glob without wildcards."""
    info: Mapping[str, object]
    """What fsspec says of the file; its size and version, unless the listing is a web server's index page."""


def _find_listed(search: _Search, cache: FileCache) -> list[RemoteFile]:
    """Find the files of a folder or a glob; hidden ones are left out."""
    address, is_web = search.given, _is_web(search.given)
    by_name: dict[str, _Listed] = {}
    for file in cache.network.ask(address, lambda store: _list_files(store, search)):
        if not _is_hidden(file.name):
            _check_name(file.name, redact(file.url), search.key)
            by_name.setdefault(file.name, file)

    def open_file(file: _Listed) -> RemoteFile:
        # An index page tells no sizes.
        details = cache.network.details(file.url) if is_web else details_in(file.info, file.url)
        return RemoteFile(file.url, file.name, details, cache)

    return list(thread_map(open_file, list(by_name.values())))


def _list_files(store: AbstractFileSystem, search: _Search) -> list[_Listed]:
    """List the files of a glob, or those of a folder that can be read; the shorter of two addresses comes first.

    An index page may name a file twice, with and without a query.
    """
    is_web, plain = _is_web(search.given), _without_web_query(search.given)
    is_glob = glob.has_magic(plain)
    # fsspec leaves out folders of index pages that give no answer, unless told to raise.
    strict = {"on_error": "raise", "maxdepth": _DEEPEST_FOLDER} if is_web else {}
    find = store.glob if is_glob else store.find
    # Private, for fsspec has no public way: the paths of its listings have no protocol, nor must what is cut off them.
    start = store._strip_protocol(_root_there(plain)).rstrip("/") + "/"
    listed: list[_Listed] = []
    for path, info in sorted(find(plain, detail=True, **strict).items()):
        if info["type"] == "file" and (is_glob or without_query(path).endswith(search.suffixes)):
            name = _unquoted(path.removeprefix(start), is_web=is_web)
            listed.append(_Listed(store.unstrip_protocol(path), name, info))
    return listed


def _unquoted(path: str, *, is_web: bool) -> str:
    """Give a path without the `%20` of a web server, so that a file has one name here and there."""
    return unquote(without_query(path)) if is_web else path


def _is_hidden(name: str) -> bool:
    """Whether a path is hidden, as caches and checkpoints of notebooks are, or leads up, as `..` in a listing does."""
    return any(part.startswith(".") for part in name.split("/"))


def _check_name(name: str, url: str, key: str) -> None:
    """Raise a DataError on a name that messages cannot show, or that is a path on some systems only."""
    if not name.isprintable() or "\\" in name:
        raise DataError(
            "a listing holds a file name with control characters or a backslash", where=f"{key}, {url}", found=name
        )
