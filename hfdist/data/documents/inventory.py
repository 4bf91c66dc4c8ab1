"""What the files of a run held, noted beside its ledger: a resumed run names the files and rows that have changed.

A part of a file is known by its hash alone, at most 1024 of them a file: see `part_bytes`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.data.cache import digest_of
from hfdist.data.sources.base import Shard
from hfdist.data.storage.identity import Contents
from hfdist.errors import CheckpointError
from hfdist.units import count

logger = logging.getLogger(__name__)

_SHOWN_FILES, _SHOWN_SPANS = 8, 4


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
    def of(cls, source: str, shard: Shard) -> _Entry:
        parts = None if shard.contents is None else shard.contents.astype("<u8").tobytes().hex()
        return cls(f"{source}:{shard.name}", sum(shard.runs), shard.identity, parts, shard.place)

    @property
    def contents(self) -> Contents | None:
        return None if self.parts is None else np.frombuffer(bytes.fromhex(self.parts), dtype="<u8")


class Inventory:
    """All shards of a corpus, with the names of their sources, in canonical order."""

    def __init__(self, shards: Sequence[tuple[str, Shard]]) -> None:
        self._shards = {f"{source}:{shard.name}": shard for source, shard in shards}
        self._entries = [_Entry.of(source, shard) for source, shard in shards]

    @cached_property
    def digest(self) -> str:
        """Digest of all that does not depend on the machine: name, rows, identity and contents of each shard."""
        return _digest_of(self._entries)

    def write(self, folder: Path) -> None:
        """Write the inventory into a ledger's folder, unless it is there."""
        path = _path(folder, self.digest)
        if not path.is_file():
            lines = (json.dumps(asdict(entry)).encode() + b"\n" for entry in self._entries)
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
        lines = list(self._changes({entry.name: entry for entry in before}))
        more = len(lines) - _SHOWN_FILES
        return [*lines[:_SHOWN_FILES], f"and {count(more, 'more file')}"] if more > 0 else lines

    def _changes(self, before: dict[str, _Entry]) -> Iterator[str]:
        for entry in self._entries:
            old = before.pop(entry.name, None)
            if old is None:
                yield f"{entry.name} is new"
            elif old.rows != entry.rows:
                yield f"{entry.name} has {entry.rows:,} rows, not {old.rows:,}{self._where(old, entry)}"
            elif old.identity != entry.identity or _differ(old, entry):
                yield f"{entry.name}{self._where(old, entry)}"
        yield from (f"{name} is gone" for name in before)

    def _where(self, old: _Entry, entry: _Entry) -> str:
        """Give the rows in which a file has changed, as far as they are known."""
        ours, theirs = entry.contents, old.contents
        if ours is None or theirs is None or len(ours) != len(theirs):
            return ""
        shard = self._shards[entry.name]
        found = [shard.rows_of_part(part) for part in np.flatnonzero(ours != theirs).tolist()]
        known = [rows for rows in found if rows is not None]
        if len(known) < len(found):
            return ""
        spans = _merged(known)
        shown = [str(rows.start) if len(rows) == 1 else f"{rows.start} to {rows.stop - 1}" for rows in spans]
        listed = ", ".join([*shown[:_SHOWN_SPANS], *(["..."] if len(shown) > _SHOWN_SPANS else [])])
        unit = "row" if len(spans) == 1 and len(spans[0]) == 1 else "rows"
        return f", {unit} {listed}" if listed else ""

    def _touched(self, digest: str, folder: Path | None) -> list[str]:
        """Give the files whose times or addresses differ, and of which only sizes and ends are known to be the same."""
        if all(entry.place is None for entry in self._entries):
            return []
        places = {entry.name: entry.place for entry in _read_entries(folder, digest) or ()}
        known = [entry for entry in self._entries if entry.place is not None and entry.name in places]
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


def _merged(spans: list[range]) -> list[range]:
    """Join ranges, in order of their starts, that touch or overlap."""
    merged: list[range] = []
    for span in spans:
        if merged and span.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged


def _differ(old: _Entry, entry: _Entry) -> bool:
    """Whether both are known and not the same."""
    return None not in (old.parts, entry.parts) and old.parts != entry.parts


def _path(folder: Path, digest: str) -> Path:
    return folder / f"files-{digest}.jsonl"
