"""Whether downloaded files are those of the repository: by the hash that names them in the Hub's cache, once each."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hfdist.models.hub.client import DamagedError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22
_AT_ONCE = 4


def verify_files(files: Iterable[Path], notes: Path) -> None:
    """Hash the files that no earlier run has, and remove those that are damaged, so that they are fetched again.

    huggingface_hub compares sizes alone.

    Args:
        files: of a snapshot in the Hub's cache: links to files that bear their hash as a name.
        notes: a folder for what is known to be whole.

    Raises:
        DamagedError: some are damaged, and are gone now.
    """
    notes.mkdir(parents=True, exist_ok=True)
    unknown = [file for file in files if not _is_noted(file, notes)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        damaged = [file for file, is_whole in zip(unknown, pool.map(_is_whole, unknown), strict=True) if not is_whole]
    for file in unknown:
        if file in damaged:
            # Two names may lead to one content.
            file.resolve().unlink(missing_ok=True)
            file.unlink()
        else:
            _note(file, notes).write_text(_stamp(file), encoding="utf-8")
    if damaged:
        raise DamagedError(f"{damaged[0].name} does not have the hash that the Hub says")


def _is_whole(file: Path) -> bool:
    """Compare the content with the name: SHA-256 of large files, git's SHA-1 of small ones."""
    blob = file.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        # Where the file system has no links, or a mirror of the Hub has other names.
        return True
    with blob.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == blob.name


def _note(file: Path, notes: Path) -> Path:
    return notes / file.resolve().name


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _is_noted(file: Path, notes: Path) -> bool:
    note = _note(file, notes)
    return note.is_file() and note.read_text(encoding="utf-8") == _stamp(file)
