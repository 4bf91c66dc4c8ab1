"""The manifest: size and hash of every file of a checkpoint, written last, so that its presence means complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hfdist.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the folder's layout; a reader refuses any other."""

MAX_JSON_BYTES = 512_000_000


class DamagedError(CheckpointError):
    """A checkpoint that is not what was once written. `reason` is short enough for a file name."""

    def __init__(self, reason: str, what: str, *, where: Path, found: object = None) -> None:
        super().__init__(
            what,
            where=str(where),
            found=found,
            hint="another checkpoint, or checkpoint.resume=auto, which takes the newest that verifies",
        )
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Files by path relative to the checkpoint, with `/`."""

    step: int
    files: dict[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        files = {name: {"bytes": r.num_bytes, "sha256": r.sha256} for name, r in sorted(self.files.items())}
        return {"format": FORMAT, "step": self.step, "files": files}


def list_files(folder: Path) -> dict[str, int]:
    """Sizes in bytes of all files below `folder`, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest.

    Raises:
        DamagedError: there is none (the save was cut short), or it is not one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedError("no-manifest", "an unfinished checkpoint, or none at all", where=folder)
    content = read_json(path)
    try:
        files = {
            name: FileRecord(num_bytes=int(record["bytes"]), sha256=str(record["sha256"]))
            for name, record in content["files"].items()
        }
        manifest = Manifest(step=int(content["step"]), files=files)
        version = content["format"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError("bad-manifest", "the manifest is damaged", where=path, found=error) from error
    if version != FORMAT:
        raise DamagedError("format", "written by another version of hfdist", where=path, found=f"format {version}")
    return manifest


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        DamagedError: it is not JSON, or far too large.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError("bad-json", "a JSON file of the checkpoint is damaged", where=path, found=error) from error


def inside(folder: Path, name: str) -> Path:
    """Give the path of a file that a manifest or an index names.

    Raises:
        DamagedError: it leads out of the folder, or through a symbolic link.
    """
    relative = PurePosixPath(name)
    path = folder / relative
    steps = [folder.joinpath(*relative.parts[: i + 1]) for i in range(len(relative.parts))]
    if relative.is_absolute() or ".." in relative.parts or "\0" in name or any(step.is_symlink() for step in steps):
        raise DamagedError("outside", "a file name leads out of the checkpoint", where=folder, found=name)
    return path


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there with its size: cheap, and finds a torn write.

    Raises:
        DamagedError: a file is missing, shorter or longer, or outside of the folder.
    """
    for name, record in manifest.files.items():
        path = inside(folder, name)
        if not path.is_file():
            raise DamagedError("missing-file", "a file of the checkpoint is missing", where=path)
        found = path.stat().st_size
        if found != record.num_bytes:
            raise DamagedError(
                "size", "a file of the checkpoint was cut or grew", where=path, found=f"{found} of {record.num_bytes} B"
            )


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files whole and compare their hashes.

    Raises:
        DamagedError: a file's content has changed.
    """
    for name in names:
        path = inside(folder, name)
        if hash_file(path) != manifest.files[name].sha256:
            raise DamagedError("hash", "the content of a file of the checkpoint has changed", where=path)


def verify(path: Path) -> None:
    """Check a whole checkpoint, all bytes of it, in this process.

    Raises:
        CheckpointError: it is unfinished or damaged.
    """
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    check_hashes(path, manifest, manifest.files)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
