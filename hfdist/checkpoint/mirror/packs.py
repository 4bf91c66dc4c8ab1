r"""Packs: how files that grow beside the checkpoints of a run, such as logs, are sent with each checkpoint.

A pack holds the parts of files that are new since the pack before: a head of JSON, and then the bytes of the parts.

    pack 1    [["metrics.jsonl", 0, 310], ["ledger/lane-00000.records", 0, 720]]\n   1,030 bytes
    pack 2    [["ledger/lane-00000.records", 720, 360]]\n                             360 bytes

A part that begins at 0 begins its file anew. The last packs are sent anew together with what is new, if they are not
much larger: so there are few packs, and a byte is sent only a few times.
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
"""The most bytes of a pack's head."""
_MOST_FILES = 100_000
"""The most files that packs may make: each takes a place on the disk, even if it is empty."""
_MOST_PACKS = 10_000
"""The most packs of one checkpoint: each takes a request."""
_RACY_SECONDS = 2.0
"""A file that has changed in the last seconds may change again and keep the time of its change."""
_READ_BYTES = 2**20
_JOINED = 2
"""A pack is sent anew with what is new if it has at most so many times as many bytes."""


class Stamp(NamedTuple):
    """Three numbers of a file, of which at least one is another once the file has changed."""

    num_bytes: int
    changed_ns: int
    """Time of the last change, in nanoseconds."""
    inode: int


class Part(NamedTuple):
    """Some bytes of a file, of this name."""

    name: str
    begin: int
    """Offset of its first byte in the file."""
    num_bytes: int

    @property
    def end(self) -> int:
        """Offset after its last byte."""
        return self.begin + self.num_bytes


class _Sent(NamedTuple):
    """A part that was sent, and the hash of its bytes."""

    part: Part
    xxh128: str


@dataclass(frozen=True)
class Pack:
    """A pack in the mirror, without the bytes of its parts."""

    content: Content
    """Size and hash of the whole pack."""
    parts: Sequence[Part]
    hashes: Sequence[str]
    """Hash of the bytes of each part."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)


def make_pack(files: Mapping[str, Path], parts: Sequence[Part]) -> tuple[Pack, bytes]:
    """Read parts of files, and make a pack of them.

    Args:
        files: paths by name.
        parts: the parts; one ends earlier if its file is shorter by now.

    Returns:
        The pack, and its bytes.
    """
    found = [_read(files[part.name], part.begin, part.num_bytes) for part in parts]
    parts = [part._replace(num_bytes=len(data)) for part, data in zip(parts, found, strict=True)]
    data = b"".join([json.dumps(parts).encode(), b"\n", *found])
    return Pack(Content.of(data), parts, [xxhash.xxh3_128_hexdigest(one) for one in found]), data


def read_pack(
    content: Content, data: bytes, where: str, is_expected: Callable[[str], bool]
) -> Iterator[tuple[Part, bytes]]:
    """Give the parts of a pack, each with its bytes.

    Args:
        content: size and hash of the pack.
        data: the bytes of the pack.
        where: the place that a message names.
        is_expected: says whether a pack may hold a file of a name.

    Raises:
        DamagedError: the bytes are not those of a pack, or it holds a file that is not expected.
    """
    try:
        head, _, rest = data.partition(b"\n")
        if len(head) > _MOST_HEAD_BYTES:
            raise ValueError("its head is too long")
        parts = [Part(str(name), whole_number(begin), whole_number(size)) for name, begin, size in json.loads(head)]
        if sum(part.num_bytes for part in parts) != len(rest):
            raise ValueError("it has another size")
        if len({part.name for part in parts}) != len(parts):
            raise ValueError("it names a file twice")
        for part in parts:
            if not is_expected(part.name):
                raise ValueError(f"it holds {ascii(part.name)[:200]}, which is no record")
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError("bad-pack", "a pack of the mirror is damaged", where=where, found=error) from error
    begin = 0
    for part in parts:
        yield part, rest[begin : begin + part.num_bytes]
        begin += part.num_bytes


def write_part(folder: Path, part: Part, data: bytes) -> None:
    """Add the bytes of a part to its file in a folder; DamagedError: the file does not end where the part begins."""
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
    """Refuse more packs than a checkpoint may have, and more files than packs may make.

    Raises:
        DamagedError: there are more; `where` is the place that a message names.
    """
    if num_packs > _MOST_PACKS or num_files > _MOST_FILES:
        what = "the mirror has too many files beside a checkpoint"
        found = f"{num_packs:,} packs, {num_files:,} files; allowed are {_MOST_PACKS:,} and {_MOST_FILES:,}"
        raise DamagedError("bad-pack", what, where=where, found=found)


def stamps_of(files: Mapping[str, Path]) -> dict[str, Stamp]:
    """Give the stamps of files by name, without those that have just changed: they may change again unseen."""
    latest = time.time() - _RACY_SECONDS
    stamps = {}
    for name, path in files.items():
        status = path.stat()
        if status.st_mtime < latest:
            stamps[name] = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
    return stamps


def find_new(
    files: Mapping[str, Path], packs: Sequence[Pack], unchanged: Collection[str] = ()
) -> tuple[list[Pack], list[list[Part]]]:
    """Find the bytes of files that are not in packs yet.

    Args:
        files: paths by name.
        packs: the packs that were sent, in order.
        unchanged: names of the files that have not changed since then: they are not read again.

    Returns:
        The packs that stay, and for each further pack its parts.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}
    chains = _chains(packs)
    # The bytes of a file from its begin here on are not in packs.
    begins = {
        name: _num_sent(path, chains.get(name, []), is_unchanged=name in unchanged) for name, path in files.items()
    }
    new = {name for name, size in sizes.items() if size > begins[name]}
    kept = list(packs)
    if not new and not _emptied(sizes, kept):
        return kept, []
    num_bytes = sum(sizes[name] - begins[name] for name in new)
    # Take the last packs back, as long as they are not much larger than what is sent now and all fits in one pack.
    while kept and kept[-1].num_bytes <= min(_JOINED * num_bytes, CONTENT_BYTES - num_bytes):
        for part in kept.pop().parts:
            if part.name in files:
                begins[part.name] = min(begins[part.name], part.begin)
        num_bytes = sum(sizes[name] - begins[name] for name in files)
    new = {name for name in files if sizes[name] > begins[name]} | _emptied(sizes, kept)
    return kept, list(_fill(Part(name, begins[name], sizes[name] - begins[name]) for name in sorted(new)))


def _emptied(sizes: Mapping[str, int], packs: Sequence[Pack]) -> set[str]:
    """Name the files that are empty by now, and of which packs still hold some bytes."""
    with_bytes = {name for name, chain in _chains(packs).items() if any(sent.part.num_bytes for sent in chain)}
    return {name for name in with_bytes if sizes.get(name) == 0}


def _chains(packs: Sequence[Pack]) -> dict[str, list[_Sent]]:
    """Give the sent parts of each file in order, from the last one that begins it anew."""
    chains: dict[str, list[_Sent]] = {}
    for pack in packs:
        for part, xxh128 in zip(pack.parts, pack.hashes, strict=True):
            if part.begin == 0:
                chains[part.name] = []
            chains.setdefault(part.name, []).append(_Sent(part, xxh128))
    return chains


def _num_sent(path: Path, chain: Sequence[_Sent], *, is_unchanged: bool) -> int:
    """Give how many bytes of a file its sent parts hold; 0: some of these bytes have changed since then."""
    if not is_unchanged and any(_hash(path, sent.part) != sent.xxh128 for sent in chain):
        return 0
    return chain[-1].part.end if chain else 0


def _fill(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Put parts into packs, each as full as it can be; a part may be divided."""
    pack: list[Part] = []
    room = most = CONTENT_BYTES - _MOST_HEAD_BYTES
    for part in parts:
        if part.num_bytes == 0:
            # A part without bytes begins its file anew.
            pack.append(part)
        begin = part.begin
        while begin < part.end:
            taken = min(part.end - begin, room)
            pack.append(Part(part.name, begin, taken))
            begin += taken
            room -= taken
            if room == 0:
                yield pack
                pack, room = [], most
    if pack:
        yield pack


def _hash(path: Path, part: Part) -> str:
    """Hash the bytes of a part as its file has them now."""
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
