"""The manifest: sizes and hashes of all files of a checkpoint. It is written last: a folder with one is complete.

    manifest.json                      step, size of each file, hashes of the small files, a hash of itself
    training_state/hashes-00000.json   hashes of the parts of tensor files that rank 0 has written
    training_state/hashes-00001.json   those of rank 1, and so on

So the manifest does not grow with the parts of which ranks make the files. XXH3 finds damage as surely as SHA-256, at
ten times its speed; neither would keep out somebody who can write a manifest. docs/checkpoints.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import xxhash

from hfdist.errors import CheckpointError
from hfdist.version import __version__
from hfdist.whole_numbers import whole_number

MANIFEST = "manifest.json"
NO_MANIFEST = "no-manifest"
"""The `reason` of a `DamagedError` about a folder without a manifest."""
FORMAT = 3
"""Version of a checkpoint's format; the manifest of each version has it under `format`."""
FORMATS = (2, FORMAT)
"""Formats that can be read. In format 2 the manifest itself holds the hashes of all parts."""
HASHES_STEM = "training_state/hashes-"
"""Begin of the names of the files of hashes."""

MAX_JSON_BYTES = 64 * 2**20
"""Most bytes of a JSON file, written or read: nobody's file takes more memory than that."""
_READ_BYTES = 4 * 2**20
_MAX_NAME_BYTES = 255


class DamagedError(CheckpointError):
    """A checkpoint that is not what was once written. Its `reason` is a word for a file name, such as `hash`."""

    def __init__(self, reason: str, what: str, *, where: Path | str, found: object = None) -> None:
        super().__init__(
            what,
            where=str(where),
            found=found,
            hint="another checkpoint, or checkpoint.resume=auto, which takes the newest that verifies",
        )
        self.reason = reason


class FormatError(CheckpointError):
    """A checkpoint of a version of the format that this hfdist does not read; that is no damage."""

    def __init__(self, version: int, *, where: Path, written_by: object = None) -> None:
        if written_by is None:
            written_by = "a later version" if version > FORMAT else "an earlier version"
        super().__init__(
            "a checkpoint of another format",
            where=str(where),
            found=f"format {version}, written by hfdist {written_by}",
            allowed=f"format {' or '.join(map(str, FORMATS))}, which hfdist {__version__} reads",
            hint="the version of hfdist that wrote it, or another run.name (in Python: output_dir) for a new run",
        )


class Part(NamedTuple):
    """A run of bytes of a file, hashed by itself."""

    file: str
    """Path relative to the checkpoint, with `/`."""
    begin: int
    """Offset of its first byte in the file."""
    num_bytes: int
    xxh128: str
    """Hash of its bytes, as `xxhsum -H2` prints it."""

    @classmethod
    def first(cls, file: str, content: bytes) -> Part:
        """Give the part that a file begins with, from its bytes."""
        return cls(file, 0, len(content), xxhash.xxh3_128(content).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the files of a checkpoint must be."""

    step: int
    """Number of optimizer steps that the state has done."""
    files: dict[str, int]
    """Bytes of each file, by name."""
    parts: list[Part]
    """Parts whose hashes stand in the manifest itself; `list_parts` gives all parts."""
    digest: str = ""
    """The manifest's hash of itself, if it was read."""

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(self.files.values())

    @property
    def files_of_hashes(self) -> list[Part]:
        """The files of hashes, each as one part, in order of the ranks that have written them."""
        return sorted(part for part in self.parts if part.file.startswith(HASHES_STEM))

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, whose other files are whole. Each of `parts` must be a whole file."""
        hashes = {part.file: {"xxh128": part.xxh128} for part in self.parts}
        files = {name: {"bytes": self.files[name]} | hashes.get(name, {}) for name in sorted(self.files)}
        content = {"format": FORMAT, "hfdist": __version__, "step": self.step, "files": files}
        write_json(folder / MANIFEST, json.dumps(content | {"xxh128": hash_of_content(content)}, indent=1))


def hash_of_content(content: Mapping[str, object]) -> str:
    """Give the hash of a JSON object, by which a manifest knows whether it has changed."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedError: there is no manifest, as after a save that was cut short, or it has changed.
        FormatError: it is of another version of the format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedError(NO_MANIFEST, "an unfinished checkpoint, or none at all", where=folder)
    content = read_json(path)
    try:
        version, own_hash = whole_number(content["format"]), content.pop("xxh128", None)
        # With which version the hash fits: a bit of the version itself may have changed.
        written_as = [known for known in FORMATS if own_hash == hash_of_content(content | {"format": known})]
        if written_as and version not in written_as:
            raise DamagedError("format", "the number of the format has changed", where=path, found=f"format {version}")
        if version not in FORMATS:
            raise FormatError(version, where=path, written_by=content.get("hfdist"))
        if not written_as:
            raise ValueError("its own hash does not fit")
        files = {name: whole_number(record["bytes"]) for name, record in content["files"].items()}
        if not files:
            raise ValueError("it lists no files")
        parts = [part for name, record in content["files"].items() for part in _parse_record(name, record)]
        return Manifest(step=whole_number(content["step"]), files=files, parts=parts, digest=own_hash)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError("bad-manifest", "the manifest is damaged", where=path, found=error) from error


def _parse_record(file: str, record: dict[str, Any]) -> list[Part]:
    """Give the parts of a file whose hashes stand in the manifest: a small file as one, of a tensor file none.

    In format 2 these are all parts of any file.
    """
    if "xxh128" in record and "parts" not in record:
        return [Part(file, 0, record["bytes"], str(record["xxh128"]))]
    parts: list[Part] = []
    end = 0
    for num_bytes, xxh128 in record.get("parts", []):
        parts.append(Part(file, end, whole_number(num_bytes), str(xxh128)))
        end += parts[-1].num_bytes
    if "parts" in record and record["bytes"] != end:
        raise ValueError(f"{file}: {record['bytes']} bytes in parts of together {end}")
    return parts


# ---- the hashes of what each rank wrote ----


def write_hashes(folder: Path, of_rank: int, parts: Iterable[Part]) -> Part:
    """Write the file of hashes of a rank, and check that it can be read again.

    Args:
        folder: the checkpoint.
        of_rank: the rank.
        parts: the parts that it has written.

    Returns:
        The file of hashes, as one part.
    """
    name = f"{HASHES_STEM}{of_rank:05d}.json"
    by_file = {
        file: [[part.begin, part.num_bytes, part.xxh128] for part in of_file]
        for file, of_file in groupby(sorted(parts), key=lambda part: part.file)
    }
    write_json(folder / name, json.dumps(by_file))
    written = hash_file(folder, name)
    read_hashes(folder, written)
    return written


def read_hashes(folder: Path, file: Part) -> list[Part]:
    """Read the parts that a rank has written from its file of hashes; DamagedError: the file has changed."""
    _check_hash(folder, file)
    path = inside(folder, file.file)
    try:
        return [
            Part(name, whole_number(begin), whole_number(num_bytes), str(xxh128))
            for name, of_file in read_json(path).items()
            for begin, num_bytes, xxh128 in of_file
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedError("bad-hashes", "a file of hashes is damaged", where=path, found=error) from error


def list_parts(folder: Path, manifest: Manifest) -> list[Part]:
    """List all parts of all files in order; DamagedError: a file of hashes is damaged, or some bytes have no hash."""
    parts = [*manifest.parts, *chain(*(read_hashes(folder, file) for file in manifest.files_of_hashes))]
    by_file = {file: list(of_file) for file, of_file in groupby(sorted(parts), key=lambda part: part.file)}
    for file in by_file.keys() | manifest.files.keys():
        # Each part must begin where the one before ends, and the last end with the file.
        of_file = by_file.get(file, [])
        ends = [0, *(part.begin + part.num_bytes for part in of_file)]
        if [*(part.begin for part in of_file), manifest.files.get(file)] != ends:
            raise DamagedError("parts", "the hashes are not those of the whole file", where=folder / file)
    return [part for of_file in by_file.values() for part in of_file]


# ---- files of JSON ----


def write_json(path: Path, text: str) -> None:
    """Write a JSON file of a checkpoint; CheckpointError: it is larger than `read_json` takes."""
    content = text.encode()
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(
            "a file of a checkpoint is too large to be read again, so the checkpoint is not written",
            where=path.name,
            found=f"{len(content):,} bytes",
            allowed=f"{MAX_JSON_BYTES:,} bytes",
            hint="the checkpoints before it stay",
        )
    path.write_bytes(content)


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint; DamagedError: it is not JSON, or far too large."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        return parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError("bad-json", "a JSON file of the checkpoint is damaged", where=path, found=error) from error


def parse_json(content: bytes) -> Any:
    """Give the value of a JSON text, in which no name of an object may stand twice.

    Raises:
        ValueError: it is no such text.
        RecursionError: its objects are nested too deep.
    """
    return json.loads(content, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name stands there twice")
    return content


def inside(folder: Path, name: str) -> Path:
    """Give the path of a file that a manifest or an index names.

    Raises:
        DamagedError: the name leads out of the folder, or through a symbolic link, or is no name of a file.
    """
    relative = PurePosixPath(name)
    # No file system takes longer names: to ask for one raises an error like that of a broken disk.
    is_too_long = any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in relative.parts)
    # JSON has these, and no name of a file: a zero, and half of a surrogate pair.
    has_odd_letters = any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in name)
    is_outside = relative.is_absolute() or ".." in relative.parts
    # In this order: to look for a link with an odd name would raise another error.
    if (
        is_too_long
        or has_odd_letters
        or is_outside
        or any((folder / path).is_symlink() for path in (relative, *relative.parents[:-1]))
    ):
        raise DamagedError("outside", "a file name leads out of the checkpoint", where=folder, found=name)
    return folder / relative


def check_files(folder: Path, manifest: Manifest, parts: Iterable[Part]) -> None:
    """Check that every file of a manifest is there with its size, and that some parts have their hashes.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        parts: the parts whose bytes are read; none: only sizes are compared, which is quick.

    Raises:
        DamagedError: a file is missing, shorter, longer or outside of the folder, or the bytes of a part have changed.
    """
    for name, num_bytes in manifest.files.items():
        path = inside(folder, name)
        if not path.is_file():
            raise DamagedError("missing-file", "a file of the checkpoint is missing", where=path)
        size = path.stat().st_size
        if size != num_bytes:
            found = f"{size} of {num_bytes} B"
            raise DamagedError("size", "a file of the checkpoint was cut or grew", where=path, found=found)
    for part in parts:
        _check_hash(folder, part)


def _check_hash(folder: Path, part: Part) -> None:
    if not is_intact(folder, part):
        what = "the content of a file of the checkpoint has changed"
        found = f"other bytes between {part.begin} and {part.begin + part.num_bytes}"
        raise DamagedError("hash", what, where=inside(folder, part.file), found=found)


def is_intact(folder: Path, part: Part) -> bool:
    """Whether the bytes of a part are there, and have its hash."""
    path = inside(folder, part.file)
    return path.is_file() and _hash(path, part.begin, part.num_bytes) == part.xxh128


def verify(path: Path) -> None:
    """Check all bytes of a checkpoint, in this process.

    Raises:
        CheckpointError: it is unfinished, damaged, or of another format.
    """
    manifest = read_manifest(path)
    check_files(path, manifest, list_parts(path, manifest))


def hash_file(folder: Path, name: str) -> Part:
    """Read and hash a small file, and give it as one part."""
    size = (folder / name).stat().st_size
    return Part(name, 0, size, _hash(folder / name, 0, size))


def _hash(path: Path, begin: int, num_bytes: int) -> str:
    # The hash of a whole file is what `xxhsum -H2` prints.
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while num_bytes > 0 and (data := file.read(min(num_bytes, _READ_BYTES))):
            digest.update(data)
            num_bytes -= len(data)
    return digest.hexdigest()
