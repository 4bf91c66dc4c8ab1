"""From a path, folder, glob or URL to the files that it names, in the order of their names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fsspec.spec import AbstractFileSystem

from hfdist.config.checks.urls import check_address, redact, scheme_of, without_query
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import DataFile, LocalFile, RemoteFile, thread_map
from hfdist.data.storage.network import details_in
from hfdist.errors import ConfigError, DataError

# Folders of an index page that links to itself have no end.
_DEEPEST_FOLDER = 16


def find_files(path: str, *, key: str, suffixes: tuple[str, ...], cache: FileCache) -> list[DataFile]:
    """Find what `path` names: a file, a folder with all below it, or a glob; here, or at a URL.

    Names are relative to the folder, or to the part of a glob without wildcards, so that a corpus may move. Links are
    followed, as the file system does. Hidden folders, and files in a folder without one of the suffixes, are left out.

    Raises:
        ConfigError: for `key`: no such file, a kind that cannot be read, an address with a secret.
        DataError: the store does not answer.
    """
    scheme = scheme_of(path)
    if scheme is not None:
        check_address(path, key=key)
    files: Sequence[DataFile]
    if scheme is None or scheme == "file":
        files = _find_local(Path(path if scheme is None else unquote(path[len("file://") :])).expanduser(), suffixes)
    else:
        files = _find_remote(path, suffixes, cache, key)
    if not files:
        raise ConfigError(
            "no file is there",
            where=key,
            found=redact(path) if scheme else str(Path(path).expanduser()),
            allowed=f"a file, a folder, or a glob (quote it) of {', '.join(suffixes)}",
        )
    for file in files:
        if not file.name.endswith(suffixes):
            allowed = ", ".join(suffixes)
            raise ConfigError("a kind of file that cannot be read", where=key, found=file.url, allowed=allowed)
        if isinstance(file, LocalFile) and not os.access(file.url, os.R_OK):
            raise ConfigError("the file cannot be read: permission denied", where=key, found=file.url)
    return sorted(files, key=lambda file: file.name)


def _find_local(pattern: Path, suffixes: tuple[str, ...]) -> list[LocalFile]:
    if pattern.is_dir():
        root, paths = pattern, [path for path in pattern.rglob("*") if path.name.endswith(suffixes)]
        paths = [path for path in paths if not _is_hidden(path.relative_to(root).as_posix())]
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parent.parts))
        paths = [Path(path) for path in glob.glob(str(pattern), recursive=True)]
    # Some writers name folders like files.
    return [LocalFile(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]


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
