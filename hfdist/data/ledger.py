"""What every sequence of a run was made of, on disk: one file a lane, so that each has one writer at a time.

Written at each save, before the checkpoint that counts it, and before it takes much memory. What a kill leaves behind
the last checkpoint is cut off when the run goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hfdist.config.data import BadRows
from hfdist.data.corpus import Corpus
from hfdist.data.records import RECORD, Fate, Records

logger = logging.getLogger(__name__)

LEDGER = "ledger"
_MOST_WARNINGS = 20
_MOST_WAITING_BYTES = 4 << 20


def records_file(folder: Path, lane: int) -> Path:
    """Where a lane's records are: RECORD values, one behind the other."""
    return folder / f"lane-{lane:05d}.records"


def bad_rows_file(folder: Path, lane: int) -> Path:
    """Where a lane's bad rows are, under `data.on_bad_rows=quarantine`: JSON lines."""
    return folder / f"lane-{lane:05d}.bad_rows.jsonl"


class Ledger:
    """Collects records of some lanes, and writes them when asked, or when they are many.

    Args:
        folder: of the run's ledger.
        corpus: to name rows.
        on_bad_rows: whether bad rows are written down, too.
    """

    def __init__(self, folder: Path, corpus: Corpus, on_bad_rows: BadRows) -> None:
        self._folder, self._corpus, self._on_bad_rows = folder, corpus, on_bad_rows
        self._waiting: dict[Path, list[bytes]] = {}
        """For each file, what is to be written."""
        self._num_waiting_bytes = 0
        self.num_bad_rows = 0
        """Met since the start."""

    def add(self, lane: int, records: Records, problems: tuple[str, ...]) -> None:
        """Take the records of one sequence; bad rows are warned of."""
        self._wait(records_file(self._folder, lane), records.tobytes())
        bad = records[records["fate"] == Fate.bad]
        for record, problem in zip(bad, problems, strict=True):
            self.num_bad_rows += 1
            if self.num_bad_rows <= _MOST_WARNINGS:
                logger.warning("left out: %s", problem)
            if self._on_bad_rows is BadRows.quarantine:
                self._wait(bad_rows_file(self._folder, lane), self._describe(record, problem))
        if self._num_waiting_bytes > _MOST_WAITING_BYTES:
            self.flush()

    def _wait(self, path: Path, content: bytes) -> None:
        self._waiting.setdefault(path, []).append(content)
        self._num_waiting_bytes += len(content)

    def _describe(self, record: np.void, problem: str) -> bytes:
        row = str(self._corpus.origin(int(record["document"])))
        line = json.dumps({"sequence": int(record["sequence"]), "row": row, "problem": problem})
        return f"{line}\n".encode()

    def flush(self) -> None:
        """Write what was added, to the disk itself. Call it before the checkpoint that counts it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, parts in self._waiting.items():
            _append(path, b"".join(parts))
        self._waiting, self._num_waiting_bytes = {}, 0

    def go_back(self, sequences: Mapping[int, int]) -> None:
        """Cut off what is behind a checkpoint.

        Args:
            sequences: of each lane, how many the checkpoint counts.
        """
        self._waiting, self._num_waiting_bytes = {}, 0
        for lane, count in sequences.items():
            path = records_file(self._folder, lane)
            if path.is_file():
                kept = int(np.searchsorted(read_records(self._folder, lane)["sequence"], count))
                os.truncate(path, kept * RECORD.itemsize)
            path = bad_rows_file(self._folder, lane)
            if path.is_file():
                os.truncate(path, _num_bytes_before(path, count))


def read_records(folder: Path, lane: int) -> Records:
    """Read a lane's records; none: an empty array. A record that a kill cut off is left out."""
    path = records_file(folder, lane)
    if not path.is_file() or path.stat().st_size < RECORD.itemsize:
        return np.zeros(0, dtype=RECORD)
    num_records = path.stat().st_size // RECORD.itemsize
    return np.memmap(path, dtype=RECORD, mode="r", shape=(num_records,))


def _num_bytes_before(path: Path, sequence: int) -> int:
    """Where the lines of `sequence` and of later ones begin, or a line that a kill cut off."""
    num_bytes = 0
    with path.open("rb") as file:
        for line in file:
            if _sequence_of(line) >= sequence:
                break
            num_bytes += len(line)
    return num_bytes


def _sequence_of(line: bytes) -> float:
    """Of a line; infinity where it is not whole."""
    try:
        return int(json.loads(line)["sequence"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
