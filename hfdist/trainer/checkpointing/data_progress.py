"""How far a run has read its data: the cursor of the whole stream in a checkpoint, and the ledger beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hfdist.checkpoint import read_lanes, read_state
from hfdist.collectives import gather_texts, on_all_ranks, on_rank_zero
from hfdist.config.islands import IslandsConfig
from hfdist.data import Cursor, PoolReport, report
from hfdist.data.order.lane_state import Columns
from hfdist.data.stream.ledger import Ledger
from hfdist.trainer.training import Training


class DataProgress:
    """Reads and sets the place of a Trainer's token stream; for other data it has nothing to do.

    Args:
        training: the handle on the Trainer.
        islands: settings of an island, which reads the data with others; None: it trains alone.
    """

    def __init__(self, training: Training, islands: IslandsConfig | None) -> None:
        self._training, self._islands = training, islands

    def merged_cursor(self) -> Cursor | None:
        """Give the cursor of the whole stream, merged from those of the data ranks; None: no stream. A collective."""
        stream = self._training.stream
        if stream is None:
            return None
        # Islands of a parameter server read one stream together, and this island sees its own part alone.
        num_readers = 1
        if self._islands is not None and stream.shares is None:
            num_readers = self._islands.shares
        cursors = [Cursor.from_bytes(text) for text in gather_texts(stream.cursor().to_bytes(), None)]
        return Cursor.merge(cursors, readers=num_readers)

    def reports(self) -> list[PoolReport]:
        """Say how much of each pool of documents the run has read. A collective."""
        return self.reports_at(self.merged_cursor())

    def reports_at(self, cursor: Cursor | None) -> list[PoolReport]:
        """Say how much of each pool was read before a cursor."""
        stream = self._training.stream
        return [] if cursor is None or stream is None else report(cursor, stream.plan)

    # ---- the ledger ----

    @property
    def _ledger(self) -> Ledger | None:
        stream = self._training.stream
        return None if stream is None else stream.ledger

    def write_ledger(self) -> None:
        """Write down what was read so far. A collective."""
        ledger = self._ledger
        on_all_ranks(lambda: None if ledger is None else ledger.flush())

    def count(self) -> None:
        """Let the checkpoint of this step count all that was read so far."""
        ledger = self._ledger
        if ledger is not None:
            ledger.count()

    def write_counted(self) -> None:
        """Write down what the checkpoint counts, before there is one; a resume cuts off what comes after the last."""
        ledger = self._ledger
        if ledger is not None:
            ledger.write_counted()

    # ---- resuming ----

    def check(self, checkpoint: Path, folder: Path) -> Columns | None:
        """Check that the data are those of a checkpoint; give where each lane stood. A collective.

        Args:
            checkpoint: path of the checkpoint.
            folder: path of the ledger, which may be missing.
        """
        stream = self._training.stream
        if stream is None:
            return None
        cursor = on_rank_zero(lambda: read_state(checkpoint)["cursor"])
        found: list[Columns | None] = []

        def check() -> None:
            found.append(read_lanes(checkpoint))
            stream.check_identity(cursor, found[0], ledger=_if_there(folder))

        on_all_ranks(check, is_told=False)
        return found[0]

    def go_back(self, cursor: Mapping[str, object], lanes: Columns | None, folder: Path) -> None:
        """Put the stream where a checkpoint left it, as `check` has found it. A collective."""
        stream = self._training.stream
        if stream is not None:
            on_all_ranks(lambda: stream.load_state_dict(cursor, lanes, ledger=_if_there(folder)), is_told=False)


def _if_there(folder: Path) -> Path | None:
    """Give the path of a ledger that exists; None: a program's stream has none unless it was given one."""
    return folder if folder.is_dir() else None
