"""What every sequence of a run was made of, on disk: one file a lane, so that each has one writer at a time.

Written at each save, before the checkpoint that counts it. What a kill leaves behind the last checkpoint is cut off
when the run goes on.
"""

from __future__ import annotations

import json
import logging
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


def records_file(folder: Path, lane: int) -> Path:
    """Where a lane's records are: RECORD values, one behind the other."""
    return folder / f"lane-{lane:05d}.records"


def bad_rows_file(folder: Path, lane: int) -> Path:
    """Where a lane's bad rows are, under `data.on_bad_rows=quarantine`: JSON lines."""
    return folder / f"lane-{lane:05d}.bad_rows.jsonl"


class Ledger:
    """Collects records of some lanes, and writes them when asked.

    Args:
        folder: of the run's ledger.
        corpus: to name rows.
        on_bad_rows: whether bad rows are written down, too.
    """

    def __init__(self, folder: Path, corpus: Corpus, on_bad_rows: BadRows) -> None:
        self._folder, self._corpus, self._on_bad_rows = folder, corpus, on_bad_rows
        self._records: dict[int, list[Records]] = {}
        self._bad_rows: dict[int, list[str]] = {}
        self.num_bad_rows = 0
        """Met since the start."""

    def add(self, lane: int, records: Records, problems: tuple[str, ...]) -> None:
        """Take the records of one sequence; bad rows are warned of."""
        self._records.setdefault(lane, []).append(records)
        bad = records[records["fate"] == Fate.bad]
        for record, problem in zip(bad, problems, strict=True):
            self.num_bad_rows += 1
            if self.num_bad_rows <= _MOST_WARNINGS:
                logger.warning("left out: %s", problem)
            if self._on_bad_rows is BadRows.quarantine:
                self._bad_rows.setdefault(lane, []).append(self._describe(record, problem))

    def _describe(self, record: np.void, problem: str) -> str:
        row = str(self._corpus.origin(int(record["document"])))
        return json.dumps({"sequence": int(record["sequence"]), "row": row, "problem": problem}, ensure_ascii=False)

    def flush(self) -> None:
        """Write what was added, to the disk itself. Call it before the checkpoint that counts it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for lane, records in self._records.items():
            _append(records_file(self._folder, lane), b"".join(part.tobytes() for part in records))
        for lane, lines in self._bad_rows.items():
            _append(bad_rows_file(self._folder, lane), "".join(f"{line}\n" for line in lines).encode())
        self._records, self._bad_rows = {}, {}

    def go_back(self, sequences: Mapping[int, int]) -> None:
        """Cut off what is behind a checkpoint.

        Args:
            sequences: of each lane, how many the checkpoint counts.
        """
        self._records, self._bad_rows = {}, {}
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
            if not line.endswith(b"\n") or json.loads(line)["sequence"] >= sequence:
                break
            num_bytes += len(line)
    return num_bytes


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
