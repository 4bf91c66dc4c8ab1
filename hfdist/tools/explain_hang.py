"""The explanation of why a run hangs, from the stacks that its ranks have left or write when asked. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hfdist.errors import PeerError
from hfdist.records import RunFolder, RunRecord, State, read_run
from hfdist.tools.begun_collectives import WaitingRanks
from hfdist.tools.hang_case import HangCase, Row
from hfdist.tools.report.text import instant
from hfdist.units import count
from hfdist.watch.diagnosis import name_ranks
from hfdist.watch.requests import ASKED, request, withdraw
from hfdist.watch.snapshot import REPORT, read_beats, read_snapshots

_ANSWER_SECONDS = 8.0
"""Seconds that all ranks have to write what they are doing; rank 0 looks for a request once a second."""
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 3.0
"""Seconds after which a rank counts as silent: three beats, of which one comes each second."""
_LOST_SECONDS = 1.0
"""The same after the watch has ended the run: it has waited for the other ranks already."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer of `hfdist explain-hang`."""

    run: str
    """State of the run, in words."""
    folder: Path | None
    """Folder of the stacks; None: there are none."""
    rows: list[Row] = field(default_factory=list)
    """What each rank does."""
    waits: list[WaitingRanks] = field(default_factory=list)
    """Ranks that wait for other ranks."""
    verdict: str = ""
    """What is wrong."""
    hint: str = ""
    """What to do."""

    def to_json(self) -> dict[str, object]:
        """Give the explanation as JSON values."""
        return {
            "run": self.run,
            "folder": None if self.folder is None else str(self.folder),
            "ranks": [row._asdict() for row in self.rows],
            "waits": [wait._asdict() for wait in self.waits],
            "verdict": self.verdict,
            "hint": self.hint,
        }

    def lines(self) -> Iterator[str]:
        """Give the explanation as lines for people."""
        yield self.run
        if self.rows:
            yield ""
            table = [["rank", "host", "step", "no progress", "what it does", "where"]]
            table += [
                [str(row.rank), row.host, str(row.step), f"{row.idle_seconds:.1f} s", row.does, row.where]
                for row in self.rows
            ]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for cells in table:
                yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        if self.waits:
            yield ""
            for wait in self.waits:
                yield f"{name_ranks(wait.waiting)} --[{wait.collective}]--> {name_ranks(wait.awaited)}"
        yield ""
        yield f"verdict: {self.verdict}"
        yield f"try:     {self.hint}"
        if self.folder is not None:
            yield f"stacks:  {self.folder}"


def explain(run_dir: Path, *, answer_seconds: float = _ANSWER_SECONDS) -> Explanation:
    """Explain why a run hangs, or why the watch has ended it.

    Args:
        run_dir: folder of the run. The ranks of a run that goes on are asked for their stacks.
        answer_seconds: seconds to wait for these.
    """
    record = read_run(run_dir)
    folder = None
    if record is not None and record.state is State.running:
        folder = _ask(run_dir, record, answer_seconds)
    folder = folder or _newest(run_dir, record)
    run = _describe_run(run_dir, record)
    if folder is not None:
        return explain_folder(folder, run)
    verdict, hint = _judge_record(record)
    return Explanation(run=run, folder=None, verdict=verdict, hint=hint)


def explain_folder(folder: Path, run: str) -> Explanation:
    """Explain what the ranks have written into a folder of the watch; `run` is the state of the run, in words."""
    heard, line = read_beats(folder)
    case = HangCase(heard, read_snapshots(folder), _SILENT_SECONDS if line is None else _LOST_SECONDS)
    found = case.judge(line or _read_report(folder))
    return Explanation(run=run, folder=folder, rows=case.rows(), **found._asdict())


def _ask(run_dir: Path, record: RunRecord, answer_seconds: float) -> Path | None:
    """Ask the ranks for their stacks, wait until all that still beat have answered, and give the folder.

    Give None if nobody answers, or if one process waits for nobody.
    """
    if record.processes < 2:
        return None
    folder = request(run_dir, time.strftime("asked-%Y%m%d-%H%M%S"))
    deadline = time.monotonic() + answer_seconds
    while time.monotonic() < deadline:
        heard, _ = read_beats(folder)
        silent = [rank for rank, one in heard.items() if one.silent_seconds > _SILENT_SECONDS]
        if heard and len(read_snapshots(folder)) >= record.processes - len(silent):
            return folder
        time.sleep(_POLL_SECONDS)
    withdraw(run_dir)
    return folder if read_snapshots(folder) else None


def _newest(run_dir: Path, record: RunRecord | None) -> Path | None:
    """Find the newest folder that the watch has left of the last start; None: there is none."""
    # The answers to an earlier request tell of that moment alone.
    folders = [path for path in RunFolder(run_dir).watch.glob("*") if path.is_dir() and not ASKED.fullmatch(path.name)]
    newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
    started = None if record is None else instant(record.started)
    if newest is None or started is None:
        return newest
    # A folder of an earlier start is about another hang.
    return newest if newest.stat().st_mtime >= started.timestamp() else None


def _read_report(folder: Path) -> str | None:
    try:
        return (folder / REPORT).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _describe_run(run_dir: Path, record: RunRecord | None) -> str:
    if record is None:
        return f"{run_dir}: run.json is missing or cannot be read"
    code = "" if record.exit_code is None else f" with exit code {record.exit_code}"
    done = f"{record.step} steps done, {count(record.processes, 'rank')}"
    return f"{run_dir}: start {record.start}, {record.state.value}{code}, {done}"


def _judge_record(record: RunRecord | None) -> tuple[str, str]:
    """Give the verdict and the hint for a run of which no rank has left a stack."""
    if record is None:
        return "nothing is known of it", "its log; or the version of hfdist that ran it"
    if record.state is not State.running:
        error = "" if record.error is None else f" ({record.error})"
        code = record.exit_code if record.exit_code is not None else "none"
        hint = f"exit code {code}: docs/faults.md" if record.exit_code != PeerError.exit_code else "its log"
        return f"nothing hung in the last start: it ended as {record.state.value}{error}", hint
    place = f"on {record.host}, process {record.pid}"
    if record.processes < 2:
        return f"one process waits for nobody ({place})", f"py-spy dump --pid {record.pid}"
    verdict = (
        f"rank 0 ({place}) does not answer: it has ended or is stopped, or the run is not watched, or not yet "
        f"(watch.heartbeat_seconds=null); its record is of {record.updated}"
    )
    return verdict, f"ssh {record.host} ps {record.pid}; py-spy dump --pid {record.pid}"
