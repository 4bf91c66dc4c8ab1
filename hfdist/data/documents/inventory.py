"""What the files of a run held, noted beside its ledger: a resumed run names the files and rows that have changed.

A part of a file is known by its hash alone, at most 1024 of them a file: see `part_bytes`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.data.cache import digest_of, digest_of_pieces
from hfdist.data.sources.changed_rows import changed_rows
from hfdist.data.sources.shards import NamedShards, ShardFacts, Shards, json_of_pieces
from hfdist.data.storage.identity import Contents
from hfdist.errors import CheckpointError
from hfdist.units import count

logger = logging.getLogger(__name__)

_SHOWN_FILES = 8


@dataclass(frozen=True)
class _Entry:
    """What is noted of a shard: a line of the file."""

    name: str
    """Name of the shard, as SOURCE:FILE."""
    rows: int
    identity: str
    parts: str | None
    """`Shard.contents` in hexadecimal digits."""
    place: tuple[str, str] | None
    """`Shard.place`."""

    @classmethod
    def of(cls, source: str, facts: ShardFacts) -> _Entry:
        return cls(f"{source}:{facts.name}", facts.rows, facts.identity, facts.parts, facts.place)

    @property
    def contents(self) -> Contents | None:
        return None if self.parts is None else np.frombuffer(bytes.fromhex(self.parts), dtype="<u8")


class Inventory:
    """All shards of a corpus, with the names of their sources, in canonical order."""

    def __init__(self, sources: Mapping[str, Shards]) -> None:
        self._sources = sources

    @cached_property
    def digest(self) -> str:
        """Digest of all that does not depend on the machine: name, rows, identity and contents of each shard."""
        pieces = (one for source, shards in self._sources.items() for one in shards.contents_as_json(source))
        return digest_of_pieces(json_of_pieces("[", pieces, "]"))

    def _entries(self) -> Iterator[_Entry]:
        return (_Entry.of(source, one) for source, shards in self._sources.items() for one in shards.facts())

    def write(self, folder: Path) -> None:
        """Write the inventory into a ledger's folder, unless it is there."""
        path = _path(folder, self.digest)
        if not path.is_file():
            lines = (json.dumps(asdict(entry)).encode() + b"\n" for entry in self._entries())
            write_atomically(path, lambda out: out.writelines(lines))

    def clear_unfinished(self, folder: Path) -> None:
        """Delete from a ledger's folder what a killed `write` has left. No rank may be writing."""
        remove_unfinished(_path(folder, self.digest))

    def check(self, digest: str, folder: Path | None, *, may_change: bool) -> None:
        """Compare with what a checkpoint counts on, and say what cannot be compared.

        Args:
            digest: of the inventory of the run that has saved.
            folder: of that run's ledger, where there is one.
            may_change: warn of what has changed, instead of raising a CheckpointError.
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
        """Say in which files and rows the content has changed: at most some lines, one for each file; see `check`."""
        if digest == self.digest:
            return []
        before = _read_entries(folder, digest)
        if before is None:
            return ["some file; what each held is not beside the checkpoint's run"]
        return self._first_changes(before)

    def changes_from(self, before: Inventory) -> list[str]:
        """Say the same of another inventory."""
        return self._first_changes(before._entries())

    def _first_changes(self, before: Iterable[_Entry]) -> list[str]:
        changes = self._changes({entry.name: entry for entry in before})
        shards = NamedShards(self._sources)
        # Files are opened for those alone that are shown: a million may have changed.
        lines = [
            text if pair is None else text + changed_rows(shards[number][1], pair[0].contents, pair[1].contents)
            for text, number, pair in islice(changes, _SHOWN_FILES)
        ]
        more = sum(1 for _ in changes)
        return [*lines, f"and {count(more, 'more file')}"] if more else lines

    def _changes(self, before: dict[str, _Entry]) -> Iterator[tuple[str, int, tuple[_Entry, _Entry] | None]]:
        """Say what has changed, and give the shard's number and, where its rows may be told, both entries."""
        for number, entry in enumerate(self._entries()):
            old = before.pop(entry.name, None)
            if old is None:
                yield f"{entry.name} is new", number, None
            elif old.rows != entry.rows:
                yield f"{entry.name} has {entry.rows:,} rows, not {old.rows:,}", number, (old, entry)
            elif old.identity != entry.identity or _differ(old, entry):
                yield entry.name, number, (old, entry)
        yield from ((f"{name} is gone", -1, None) for name in before)

    def _touched(self, digest: str, folder: Path | None) -> list[str]:
        """Give the files whose times or addresses differ, and of which only sizes and ends are known to be the same."""
        if not any(shards.has_places for shards in self._sources.values()):
            return []
        places = {entry.name: entry.place for entry in _read_entries(folder, digest) or ()}
        known = [entry for entry in self._entries() if entry.place is not None and entry.name in places]
        return [entry.name for entry in known if places[entry.name] != entry.place]


def _read_entries(folder: Path | None, digest: str) -> list[_Entry] | None:
    """Read what was noted in a ledger's folder; None: it is not there, or damaged."""
    if folder is None:
        return None
    try:
        lines = _path(folder, digest).read_bytes().splitlines()
        values = [json.loads(line) for line in lines]
        entries = [_Entry(**{**value, "place": value["place"] and tuple(value["place"])}) for value in values]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return entries if _digest_of(entries) == digest else None


def _digest_of(entries: Sequence[_Entry]) -> str:
    return digest_of([[entry.name, entry.rows, entry.identity, entry.parts] for entry in entries])


def _differ(old: _Entry, entry: _Entry) -> bool:
    """Whether both are known and not the same."""
    return None not in (old.parts, entry.parts) and old.parts != entry.parts


def _path(folder: Path, digest: str) -> Path:
    return folder / f"files-{digest}.jsonl"
