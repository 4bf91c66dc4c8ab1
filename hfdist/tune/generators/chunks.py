"""Files as chunks with hashes, so that a reader fetches a chunk at a time and knows that it is the right one.

a file           |  chunk 0  |  chunk 1  |  2  |      each of CHUNK_BYTES, but for the last
its list entry      sha256      sha256     sha256     and the number of bytes
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hfdist.messages.message import Message, NotAMessageError

CHUNK_BYTES = 2**23
"""Bytes of a chunk: the list of 500 GB is a message of 4 MiB."""
_NAME = re.compile(r"(?:[A-Za-z0-9_-][\w.-]{0,200}/)?[A-Za-z0-9_-][\w.-]{0,200}", re.ASCII)
_HARMLESS = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of the names of files that cannot run code."""
_HASH = re.compile(r"[0-9a-f]{64}")


class ListedFile(NamedTuple):
    """The size and the hashes by which a file is known."""

    num_bytes: int
    hashes: tuple[str, ...]
    """SHA-256 of each chunk, as hexadecimal digits."""

    def size_of(self, chunk: int) -> int:
        """Give the number of bytes of a chunk, by its number from 0."""
        return min(CHUNK_BYTES, self.num_bytes - chunk * CHUNK_BYTES)


Listing = Mapping[str, ListedFile]
"""Files by name; a name may have one folder before it, as in 1_Pooling/config.json."""


def may_travel(name: str) -> bool:
    """Whether a file of this name is taken from another machine: it stays in its folder, and cannot run code."""
    return bool(_NAME.fullmatch(name)) and name.endswith(_HARMLESS)


def hash_chunk(content: bytes | memoryview) -> str:
    """Give the SHA-256 of a chunk, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def list_file(path: Path) -> ListedFile:
    """Read a file, and give its size and hashes; OSError: it cannot be read."""
    hashes, num_bytes, buffer = [], 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        # A raw file gives less than a chunk at its end alone, on the disks of Linux.
        while (count := file.readinto(buffer)) > 0:
            hashes.append(hash_chunk(buffer[:count]))
            num_bytes += count
    return ListedFile(num_bytes, tuple(hashes))


def write_listing(listing: Listing) -> dict[str, object]:
    """Give a listing as JSON."""
    return {name: [file.num_bytes, list(file.hashes)] for name, file in listing.items()}


def read_listing(values: Message) -> Listing:
    """Read what `write_listing` of another machine has given.

    Raises:
        NotAMessageError: it is no listing; or a file has a name that leads elsewhere, or that of a program.
    """
    found = {}
    for name in values:
        if not may_travel(name):
            raise NotAMessageError("a file has a name that none should have")
        given = values.list(name)
        if len(given) != 2:
            raise NotAMessageError("a file has no size, or no hashes")
        file = Message(size=given[0], hashes=given[1])
        num_bytes, hashes = file.integer("size"), file.list("hashes")
        is_each = all(type(one) is str and _HASH.fullmatch(one) for one in hashes)
        if not is_each or len(hashes) != -(-num_bytes // CHUNK_BYTES):
            raise NotAMessageError("a file has not one hash for each chunk")
        found[name] = ListedFile(num_bytes, tuple(hashes))
    return found
