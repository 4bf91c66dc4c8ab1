"""The list of one checkpoint in a mirror: the contents of which its files are made, in order.

    list "step-00000100"    model.safetensors    content 9f3a... (64 MiB), content 07bc... (12 MiB)
                            manifest.json        content 5d21... (3 KiB)

A content is stored under the hash of its bytes, so that equal files of several checkpoints are there once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import xxhash

from hfdist.checkpoint.folder import HELD_OUT_LOSS
from hfdist.checkpoint.manifest import DamagedError, hash_of_content, parse_json
from hfdist.version import __version__
from hfdist.whole_numbers import whole_number

CONTENT_BYTES = 64 * 2**20
"""The most bytes of a content: so many are sent again after a failure, and are held in memory."""
CONTENTS = "contents/"
"""Begin of the names of all contents in a mirror."""

_HASH = re.compile(r"[0-9a-f]{32}")


class Content(NamedTuple):
    """Some bytes of a file, known by their number and their hash."""

    num_bytes: int
    xxh128: str
    """Hash of the bytes, in 32 hexadecimal digits."""

    @classmethod
    def of(cls, data: bytes) -> Content:
        """Give the content of these bytes."""
        return cls(len(data), xxhash.xxh3_128(data).hexdigest())

    @property
    def name(self) -> str:
        """The name of the content's object in a mirror."""
        return f"{CONTENTS}{self.xxh128}"


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint in a mirror."""

    step: int
    """Number of optimizer steps that its state has done."""
    digest: str
    """The hash that the checkpoint's manifest has of itself: it tells two checkpoints of one step apart."""
    held_out_loss: float | None
    """Loss on the held-out set at its step; None: it was not evaluated there."""
    files: Mapping[str, Sequence[Content]]
    """Contents of each file, by its path in the checkpoint."""
    packs: Sequence[Content] = ()
    """Contents with the files that grow beside the checkpoint, such as logs, each a pack of parts of these."""

    @property
    def num_bytes(self) -> int:
        """Size of the checkpoint's files together."""
        return sum(content.num_bytes for content in chain.from_iterable(self.files.values()))

    def contents(self) -> Iterator[Content]:
        """List the contents of all files, and the packs; some may come twice."""
        return chain(*self.files.values(), self.packs)

    def is_whole(self, there: Mapping[str, int]) -> bool:
        """Whether the contents of the checkpoint's files are all in the mirror.

        Args:
            there: size of each object of the mirror, in bytes, by name.
        """
        return not lacks(chain.from_iterable(self.files.values()), there)

    def to_bytes(self) -> bytes:
        """Give the list as JSON, with a hash of itself."""
        values = {
            "hfdist": __version__,
            "step": self.step,
            "digest": self.digest,
            HELD_OUT_LOSS: self.held_out_loss,
            "files": {name: [list(content) for content in self.files[name]] for name in sorted(self.files)},
            "packs": [list(content) for content in self.packs],
        }
        return json.dumps(values | {"xxh128": hash_of_content(values)}).encode()

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> ListedCheckpoint:
        """Read the bytes that `to_bytes` gives; DamagedError: they are others, and `where` says of which object."""
        try:
            values = parse_json(text)
            if values.pop("xxh128") != hash_of_content(values):
                raise ValueError("its own hash does not fit")
            if not any(values["files"].values()):
                raise ValueError("it has no contents")
            loss = values[HELD_OUT_LOSS]
            return cls(
                step=whole_number(values["step"]),
                digest=str(values["digest"]),
                held_out_loss=None if loss is None else float(loss),
                files={name: [_content(*content) for content in of_file] for name, of_file in values["files"].items()},
                packs=[_content(*content) for content in values.get("packs", [])],
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedError("bad-list", "a list of the mirror is damaged", where=where, found=error) from error


def lacks(contents: Iterable[Content], there: Mapping[str, int]) -> bool:
    """Whether some contents are not among the mirror's objects, whose sizes in bytes `there` gives by name."""
    return any(there.get(content.name) != content.num_bytes for content in contents)


def _content(num_bytes: object, xxh128: object) -> Content:
    """Make a content of values that somebody else has written; ValueError: they are not those of a content."""
    if not isinstance(xxh128, str) or not _HASH.fullmatch(xxh128) or not 0 < whole_number(num_bytes) <= CONTENT_BYTES:
        raise ValueError("a content without a hash or a size")
    return Content(whole_number(num_bytes), xxh128)
