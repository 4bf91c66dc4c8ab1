r"""Files that grow beside the checkpoints of a run, as packs: each holds what was new when a checkpoint was sent.

    pack 1    [["metrics.jsonl", 0, 310], ["ledger/lane-00000.records", 0, 720]]\n   1,030 bytes
    pack 2    [["ledger/lane-00000.records", 720, 360]]\n                             360 bytes

A part that begins at 0 begins its file anew. The last packs are joined with what is new while they are not much larger:
then a byte is sent a few times, and packs are few.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from hfdist.checkpoint.manifest import DamagedError, inside
from hfdist.checkpoint.mirror.listed import CONTENT_BYTES, Content
from hfdist.whole_numbers import whole_number

_MOST_HEAD_BYTES = 16 * 2**20
_MOST_FILES = 100_000
"""Files that packs may make: each takes a place on the disk, even if it is empty."""
_MOST_PACKS = 10_000
"""Entries of one list: each takes a request."""
_RACY_SECONDS = 2.0
"""A file that has changed so shortly before may change again, and show the same time."""
_READ_BYTES = 2**20
_JOINED = 2
"""A pack is joined with what is new if it is at most so many times larger."""


Stamp = tuple[int, int, int]
"""Size of a file, its time of change and its number: a file that is changed gets another one."""


class Part(NamedTuple):
    """Bytes of a file."""

    name: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Pack:
    """What a pack holds."""

    content: Content
    parts: Sequence[Part]
    hashes: Sequence[str]
    """Hash of the bytes of each part."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)


def make_pack(files: Mapping[str, Path], parts: Sequence[Part]) -> tuple[Pack, bytes]:
    """Read parts of files; a part ends where its file does by now."""
    found = [_read(files[part.name], part.begin, part.num_bytes) for part in parts]
    parts = [part._replace(num_bytes=len(data)) for part, data in zip(parts, found, strict=True)]
    data = b"".join([json.dumps(parts).encode(), b"\n", *found])
    return Pack(Content.of(data), parts, [xxhash.xxh3_128_hexdigest(one) for one in found]), data


def read_pack(
    content: Content, data: bytes, where: str, is_expected: Callable[[str], bool]
) -> Iterator[tuple[Part, bytes]]:
    """Give the parts of a pack with their bytes; a DamagedError: it is none, or has a file that is not expected."""
    try:
        head, _, rest = data.partition(b"\n")
        if len(head) > _MOST_HEAD_BYTES:
            raise ValueError("its head is too long")
        parts = [Part(str(name), whole_number(begin), whole_number(size)) for name, begin, size in json.loads(head)]
        if sum(part.num_bytes for part in parts) != len(rest):
            raise ValueError("it has another size")
        if len({part.name for part in parts}) != len(parts):
            raise ValueError("it names a file twice")
        if strange := next((part.name for part in parts if not is_expected(part.name)), None):
            raise ValueError(f"it holds {ascii(strange)[:200]}, which is no record")
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError("bad-pack", "a pack of the mirror is damaged", where=where, found=error) from error
    begin = 0
    for part in parts:
        yield part, rest[begin : begin + part.num_bytes]
        begin += part.num_bytes


def write_part(folder: Path, part: Part, data: bytes) -> None:
    """Add a part to its file in a folder; a DamagedError: the file does not end where the part begins."""
    path = inside(folder, part.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if part.begin == 0:
            file.truncate(0)
        if file.tell() != part.begin and part.begin > 0:
            what = "the mirror lacks the bytes before a part of a file"
            raise DamagedError("bad-pack", what, where=path, found=f"{part.begin:,} where the file has {file.tell():,}")
        file.write(data)


def check_number(num_packs: int, num_files: int, where: str) -> None:
    """Refuse more packs than a list may have, and more files than packs may make; a DamagedError."""
    if num_packs > _MOST_PACKS or num_files > _MOST_FILES:
        what = "the mirror has too many files beside a checkpoint"
        found = f"{num_packs:,} packs, {num_files:,} files; allowed are {_MOST_PACKS:,} and {_MOST_FILES:,}"
        raise DamagedError("bad-pack", what, where=where, found=found)


def stamps_of(files: Mapping[str, Path]) -> dict[str, Stamp]:
    """Give the stamps of files by which their contents are known again: not of those that have just changed."""
    states = {name: path.stat() for name, path in files.items()}
    latest = time.time() - _RACY_SECONDS
    return {
        name: (state.st_size, state.st_mtime_ns, state.st_ino)
        for name, state in states.items()
        if state.st_mtime < latest
    }


def find_new(
    files: Mapping[str, Path], packs: Sequence[Pack], unchanged: Collection[str] = ()
) -> tuple[list[Pack], list[list[Part]]]:
    """Find what packs lack of files.

    Args:
        files: by name.
        packs: that were sent, the first first.
        unchanged: names of files that have not changed since then: they are not read again.

    Returns:
        The packs that stay, and the parts of each further one.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}
    chains = _chains(packs)
    begins = {name: _end_of(path, chains.get(name, []), is_unchanged=name in unchanged) for name, path in files.items()}
    new = {name for name, size in sizes.items() if size > begins[name]}
    kept = list(packs)
    if not new and not _emptied(sizes, kept):
        return kept, []
    num_bytes = sum(sizes[name] - begins[name] for name in new)
    while kept and kept[-1].num_bytes <= min(_JOINED * num_bytes, CONTENT_BYTES - num_bytes):
        for part in kept.pop().parts:
            if part.name in files:
                begins[part.name] = min(begins[part.name], part.begin)
        num_bytes = sum(sizes[name] - begins[name] for name in files)
    new = {name for name in files if sizes[name] > begins[name]} | _emptied(sizes, kept)
    return kept, list(_fill(Part(name, begins[name], sizes[name] - begins[name]) for name in sorted(new)))


def _emptied(sizes: Mapping[str, int], packs: Sequence[Pack]) -> set[str]:
    """Name the files that have nothing any more, and of which packs still hold something."""
    held = {name for name, chain in _chains(packs).items() if any(part.num_bytes for part, _ in chain)}
    return {name for name in held if sizes.get(name) == 0}


def _chains(packs: Sequence[Pack]) -> dict[str, list[tuple[Part, str]]]:
    """Give the parts of each file with their hashes, from the last one that begins it anew."""
    chains: dict[str, list[tuple[Part, str]]] = {}
    for pack in packs:
        for part, part_hash in zip(pack.parts, pack.hashes, strict=True):
            chains[part.name] = [*(chains.get(part.name, []) if part.begin else []), (part, part_hash)]
    return chains


def _end_of(path: Path, chain: Sequence[tuple[Part, str]], *, is_unchanged: bool) -> int:
    """Give how many bytes of a file its chain holds; 0: the file was changed before its end since then."""
    for part, part_hash in chain if not is_unchanged else ():
        if _hash(path, part) != part_hash:
            return 0
    return chain[-1][0].begin + chain[-1][0].num_bytes if chain else 0


def _fill(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Put parts into packs, each as full as it can be."""
    pack: list[Part] = []
    room = most = CONTENT_BYTES - _MOST_HEAD_BYTES
    for part in parts:
        if part.num_bytes == 0:
            # It begins its file anew.
            pack.append(part)
        while part.num_bytes > 0:
            taken = min(part.num_bytes, room)
            pack.append(part._replace(num_bytes=taken))
            part = part._replace(begin=part.begin + taken, num_bytes=part.num_bytes - taken)
            room -= taken
            if room == 0:
                yield pack
                pack, room = [], most
    if pack:
        yield pack


def _hash(path: Path, part: Part) -> str:
    digest, left = xxhash.xxh3_128(), part.num_bytes
    with path.open("rb") as file:
        file.seek(part.begin)
        while left > 0 and (data := file.read(min(_READ_BYTES, left))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


def _read(path: Path, begin: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(num_bytes)
