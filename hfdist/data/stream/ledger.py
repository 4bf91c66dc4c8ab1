"""The ledger of a run: records of all its sequences on disk, in one file a lane, so that a file has one writer.

    add      -> pending      records of sequences that the training has taken
    count    -> counted      a save begins: these are in its checkpoint
    write_counted -> disk    before that checkpoint is complete; a thread may do it while `add` goes on

When the run resumes, the files are truncated to what the checkpoint counts.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from hfdist.atomic_write import sync
from hfdist.config.data import BadRows
from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.records import RECORD, Records
from hfdist.data.packing.sequence import Problem

logger = logging.getLogger(__name__)

_MOST_WARNINGS = 20
"""The most bad rows that a process warns of."""


def records_file(folder: Path, lane: int) -> Path:
    """Give the file of a lane's records: RECORD values, one after the other."""
    return folder / f"lane-{lane:05d}.records"


def bad_rows_file(folder: Path, lane: int) -> Path:
    """Give the file of a lane's bad rows, under `data.on_bad_rows=quarantine`: JSON lines."""
    return folder / f"lane-{lane:05d}.bad_rows.jsonl"


class Ledger:
    """A collector of the records of some lanes, and of their bad rows under `data.on_bad_rows=quarantine`.

    Args:
        folder: the folder of the files; it is made at the first write.
        corpus: the documents; the inventory of their files is written beside the records.
        on_bad_rows: whether bad rows have files, too.
    """

    def __init__(self, folder: Path, corpus: Corpus, on_bad_rows: BadRows) -> None:
        self.folder, self._corpus, self._on_bad_rows = folder, corpus, on_bad_rows
        self._records_files: dict[int, Path] = {}
        """The file of records of each lane; kept, as making a path takes longer than adding to the file."""
        self._pending: dict[Path, list[bytes]] = {}
        """Bytes that no save has counted yet, by the file to whose end they go."""
        self._counted: list[dict[Path, list[bytes]]] = []
        """Bytes that a save has counted and that are not written yet, by file, for each save that has begun."""
        self.before_count: Callable[[], None] = lambda: None
        """A function of the stream that adds the records which the stream has given and not added yet."""
        self._writing = threading.Lock()
        self._num_bad_rows = 0

    def add(self, lane: int, records: Records, problems: Iterable[Problem]) -> None:
        """Add the records of one sequence, and warn of its `problems`; records of several must have no problems."""
        path = self._records_files.get(lane)
        if path is None:
            path = self._records_files[lane] = records_file(self.folder, lane)
        self._queue(path, records.tobytes())
        for problem in problems:
            self._num_bad_rows += 1
            if self._num_bad_rows <= _MOST_WARNINGS:
                logger.warning("left out: %s", problem.message)
            if self._num_bad_rows == _MOST_WARNINGS:
                logger.warning(
                    "other bad rows are left out without a warning; `hfdist audit` counts those it cannot read"
                )
            if self._on_bad_rows is BadRows.quarantine:
                self._queue(bad_rows_file(self.folder, lane), self._describe(int(records["sequence"][0]), problem))

    def _queue(self, path: Path, content: bytes) -> None:
        self._pending.setdefault(path, []).append(content)

    def _describe(self, sequence: int, problem: Problem) -> bytes:
        row = str(self._corpus.origin(problem.document))
        return f"{json.dumps({'sequence': sequence, 'row': row, 'problem': problem.message})}\n".encode()

    def flush(self) -> None:
        """Write all added records to the disk, and sync them."""
        self.count()
        self.write_counted()

    def count(self) -> None:
        """Set apart the records that a save which begins now counts; `write_counted` must end before the save does."""
        self.before_count()
        self._counted.append(self._pending)
        self._pending = {}

    def write_counted(self) -> None:
        """Write and sync the records that `count` has set apart; a thread may call it while training continues."""
        with self._writing:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._corpus.inventory.write(self.folder)
            is_new = False
            while self._counted:
                counted = self._counted[0]
                for path in list(counted):
                    is_new = is_new or not path.exists()
                    # Taken out first: what is written in part is truncated by the next start, and never written twice.
                    _append(path, b"".join(counted.pop(path)))
                del self._counted[0]
            if is_new:
                sync(self.folder)

    def set_aside(self, lanes: Iterable[int], samples: int) -> None:
        """Rename the files of lanes to `FILE.until-SAMPLES`: after so many sequences the run reads other data."""
        with self._writing:
            # What a training that has failed has added does not count: it goes back to here.
            self._pending, self._counted = {}, []
        for lane in lanes:
            for path in (records_file(self.folder, lane), bad_rows_file(self.folder, lane)):
                kept = path.with_name(f"{path.name}.until-{samples}")
                if kept.exists():
                    # Renamed by a start that was killed before its first checkpoint; what it wrote does not count.
                    path.unlink(missing_ok=True)
                elif path.exists():
                    path.rename(kept)

    def go_back(self, sequences: Mapping[int, int]) -> None:
        """Truncate the files of lanes; `sequences` is the number of sequences of each lane that a checkpoint counts."""
        # A thread of a training that has failed may still be writing.
        with self._writing:
            self._pending, self._counted = {}, []
            self._corpus.inventory.clear_unfinished(self.folder)
            for lane, count in sequences.items():
                path = records_file(self.folder, lane)
                if path.is_file():
                    # searchsorted would read the whole column.
                    records = read_records(self.folder, lane)
                    kept = bisect.bisect_left(records, count, key=lambda record: record["sequence"])
                    os.truncate(path, kept * RECORD.itemsize)
                path = bad_rows_file(self.folder, lane)
                if path.is_file():
                    os.truncate(path, _num_bytes_before(path, count))


def read_records(folder: Path, lane: int) -> Records:
    """Map a lane's records from its file, without an incomplete last one that a kill has left; shape [pieces]."""
    path = records_file(folder, lane)
    if not path.is_file() or path.stat().st_size < RECORD.itemsize:
        return np.zeros(0, dtype=RECORD)
    num_records = path.stat().st_size // RECORD.itemsize
    return np.memmap(path, dtype=RECORD, mode="r", shape=(num_records,))


def _num_bytes_before(path: Path, sequence: int) -> int:
    """Count the bytes before the first line of `sequence` or a later one, or before an incomplete line."""
    num_bytes = 0
    with path.open("rb") as file:
        for line in file:
            found = _sequence_of(line)
            if found is None or found >= sequence:
                break
            num_bytes += len(line)
    return num_bytes


def _sequence_of(line: bytes) -> int | None:
    """Read the number of the sequence in a line; None: the line is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["sequence"])
    except (ValueError, TypeError, KeyError):
        return None


def _append(path: Path, content: bytes) -> None:
    """Add bytes to the end of a file, and sync it; an OSError names the file."""
    try:
        with path.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Python names the file only where it cannot be opened.
        error.filename = str(path)
        raise
