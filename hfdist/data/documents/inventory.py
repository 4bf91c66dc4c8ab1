"""The inventory of a corpus: what its files held, noted beside a run's ledger, so that a resumed run names changes.

It is a file of JSON lines, one for each shard. What a shard holds is noted as hashes of at most 1,024 parts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.data.cache import digest_of, digest_of_pieces
from hfdist.data.sources.base import FilePlace
from hfdist.data.sources.changed_rows import changed_rows
from hfdist.data.sources.shards import NamedShards, ShardFacts, Shards, json_of_pieces
from hfdist.data.storage.identity import Contents
from hfdist.errors import CheckpointError
from hfdist.units import count

logger = logging.getLogger(__name__)

_SHOWN_FILES = 8


@dataclass(frozen=True)
class _Entry:
    """The line of a shard in the inventory."""

    name: str
    """Name of the shard, as SOURCE:FILE."""
    rows: int
    """Number of rows."""
    identity: str
    """Digest of the file's size and ends, and of the columns that are read: `Shard.identity`."""
    parts: str | None
    """Hashes of the parts of the file, as hexadecimal digits; None: there are none."""
    place: FilePlace | None
    """Address and version of a file whose changes may show nowhere else; None: they show in the fields above."""

    @classmethod
    def of(cls, source: str, facts: ShardFacts) -> _Entry:
        return cls(f"{source}:{facts.name}", facts.rows, facts.identity, facts.parts, facts.place)

    @property
    def contents(self) -> Contents | None:
        """`parts` as numbers; shape [parts]."""
        return None if self.parts is None else np.frombuffer(bytes.fromhex(self.parts), dtype="<u8")


class _Change(NamedTuple):
    """A shard that has changed, in the words of a message."""

    text: str
    number: int = -1
    """Canonical number of the shard; -1: it is new or gone, so that there are no entries to compare."""
    old: _Entry | None = None
    new: _Entry | None = None


class Inventory:
    """The entries of all shards of a corpus, in canonical order; shards are not opened for them."""

    def __init__(self, sources: Mapping[str, Shards]) -> None:
        self._sources = sources

    @cached_property
    def digest(self) -> str:
        """Digest of what is the same on every machine: name, rows, identity and parts of each shard."""
        pieces = (one for source, shards in self._sources.items() for one in shards.contents_as_json(source))
        return digest_of_pieces(json_of_pieces("[", pieces, "]"))

    def _entries(self) -> Iterator[_Entry]:
        return (_Entry.of(source, one) for source, shards in self._sources.items() for one in shards.facts())

    def write(self, folder: Path) -> None:
        """Write the inventory into the folder of a ledger, unless it is there."""
        path = _path(folder, self.digest)
        if not path.is_file():
            lines = (json.dumps(asdict(entry)).encode() + b"\n" for entry in self._entries())
            write_atomically(path, lambda out: out.writelines(lines))

    def clear_unfinished(self, folder: Path) -> None:
        """Delete from the folder of a ledger what a killed `write` has left. No rank may be writing."""
        remove_unfinished(_path(folder, self.digest))

    def check(self, digest: str, folder: Path | None, *, may_change: bool) -> None:
        """Compare this inventory with that of a checkpoint, and warn of files that cannot be compared.

        Args:
            digest: Digest of the inventory of the run that saved the checkpoint.
            folder: Folder of that run's ledger; None: there is none.
            may_change: Whether files may have changed, which is then logged as a warning.

        Raises:
            CheckpointError: Files have changed, and `may_change` is false.
        """
        touched = self._touched(digest, folder)
        if touched:
            logger.warning(
                "too large to be compared: of %d files, %s among them, with other times or addresses than when the run "
                "began, only sizes and ends are known to be the same",
                len(touched),
                touched[0],
            )
        changes = self.changes_since(digest, folder)
        if changes and not may_change:
            raise CheckpointError(
                "files have changed since this checkpoint",
                where="; ".join(changes),
                hint="put the old ones back; or checkpoint.allow_changes=true to go on with what they hold now",
            )
        for change in changes:
            logger.warning("changed since the checkpoint, and read as it is now: %s", change)

    def changes_since(self, digest: str, folder: Path | None) -> list[str]:
        """Describe the first files that have changed since a checkpoint, a line each; `check` has the arguments."""
        if digest == self.digest:
            return []
        before = _read_entries(folder, digest)
        if before is None:
            return ["some file; what each held is not beside the checkpoint's run"]
        return self._first_changes(before)

    def changes_from(self, before: Inventory) -> list[str]:
        """Describe the first files whose content differs from that of another inventory, a line each."""
        return self._first_changes(before._entries())

    def _first_changes(self, before: Iterable[_Entry]) -> list[str]:
        changes = self._changes({entry.name: entry for entry in before})
        # Only the files that are shown are opened for their rows: a million may have changed.
        lines = [self._describe(change) for change in islice(changes, _SHOWN_FILES)]
        num_more = sum(1 for _ in changes)
        return [*lines, f"and {count(num_more, 'more file')}"] if num_more else lines

    def _changes(self, before: dict[str, _Entry]) -> Iterator[_Change]:
        """Give what has changed since the entries `before`, which have the names of their shards."""
        gone = dict(before)
        for number, entry in enumerate(self._entries()):
            old = gone.pop(entry.name, None)
            if old is None:
                yield _Change(f"{entry.name} is new")
            elif old.rows != entry.rows:
                yield _Change(f"{entry.name} has {entry.rows:,} rows, not {old.rows:,}", number, old, entry)
            elif old.identity != entry.identity or _have_other_parts(old, entry):
                yield _Change(entry.name, number, old, entry)
        for name in gone:
            yield _Change(f"{name} is gone")

    def _describe(self, change: _Change) -> str:
        """Describe a change with its rows, where they can be told."""
        if change.old is None or change.new is None:
            return change.text
        _, shard = NamedShards(self._sources)[change.number]
        return change.text + changed_rows(shard, change.old.contents, change.new.contents)

    def _touched(self, digest: str, folder: Path | None) -> list[str]:
        """Give the names of files with other times or addresses, of which only sizes and ends can be compared."""
        if not any(shards.has_places for shards in self._sources.values()):
            return []
        places = {entry.name: entry.place for entry in _read_entries(folder, digest) or ()}
        known = [entry for entry in self._entries() if entry.place is not None and entry.name in places]
        return [entry.name for entry in known if places[entry.name] != entry.place]


def _read_entries(folder: Path | None, digest: str) -> list[_Entry] | None:
    """Read the inventory of a digest from the folder of a ledger; None: it is not there, or damaged."""
    if folder is None:
        return None
    try:
        lines = _path(folder, digest).read_bytes().splitlines()
        entries = [_read_entry(json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return entries if _digest_of(entries) == digest else None


def _read_entry(values: dict[str, Any]) -> _Entry:
    place = values["place"]
    return _Entry(**{**values, "place": None if place is None else FilePlace(*place)})


def _digest_of(entries: Sequence[_Entry]) -> str:
    """Hash entries as `Inventory.digest` does."""
    return digest_of([[entry.name, entry.rows, entry.identity, entry.parts] for entry in entries])


def _have_other_parts(old: _Entry, new: _Entry) -> bool:
    """Whether the parts of both entries are known and differ."""
    return old.parts is not None and new.parts is not None and old.parts != new.parts


def _path(folder: Path, digest: str) -> Path:
    return folder / f"files-{digest}.jsonl"
