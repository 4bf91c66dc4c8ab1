"""The verdict on a run for the script of its job: its exit code, and whether the same command should be given again.

python -m hfdist.tools.jobs.verdict RUN_DIR                            prints the number of the last start; 0: none
python -m hfdist.tools.jobs.verdict RUN_DIR START CODE MAX_RESTARTS    after a launcher's CODE: `75 again`, or `3 end`

Launchers hide the exit codes of their processes, so the verdict is read from the run's folder. START is the number of
the last start before the launcher's. `again` comes after exit code 75, and after a lost rank as long as the run gets
further: the same command then goes on from the last checkpoint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from hfdist.errors import PeerError, PreemptedError
from hfdist.records import Event, RunFolder, RunRecord, State, read_lines, read_run

WAIT_SECONDS = 10.0
"""Seconds that the end of a run may take to be seen: rank 0 may write it on another machine, to a shared disk."""
_POLL_SECONDS = 0.5
LOST = PeerError.exit_code
"""Exit code of a run that has lost a rank."""


class Verdict(NamedTuple):
    """What the script of a job must know of a run's end."""

    exit_code: int
    is_again: bool
    """Whether the same command should be given again."""


def judge(
    run_dir: Path, start: int, launcher_code: int, max_restarts: int, *, wait_seconds: float = WAIT_SECONDS
) -> Verdict:
    """Give the verdict on the start that a launcher has made.

    Args:
        run_dir: the run's folder.
        start: number of the last start before this one; 0: there was none.
        launcher_code: exit code of the launcher. It counts if the run was refused before it had a record.
        max_restarts: number of restarts in a row after lost ranks, as long as the run gets no further.
        wait_seconds: how long to wait for the end of a start that seems to run.
    """
    record = _read_ended(run_dir, wait_seconds)
    if record is None or record.start <= start:
        return Verdict(launcher_code or 1, is_again=False)
    if record.state in (State.running, State.lost) or record.exit_code == LOST:
        return Verdict(LOST, num_losses(run_dir, record) <= max_restarts)
    exit_code = record.exit_code or 0
    return Verdict(exit_code, exit_code == PreemptedError.exit_code)


def num_losses(run_dir: Path, record: RunRecord) -> int:
    """Count the lost starts in a row that have got no further, up to the last one.

        start       1      2      3      4
        exit code   lost   lost   lost   lost
        step        10     10     20     15
        count       1      2      1      2       a start that gets further begins anew; another end sets it to 0

    Args:
        run_dir: the run's folder.
        record: the record of the last start, which was lost; its end may not be among the events.
    """
    ends = [event for event in read_lines(RunFolder(run_dir).events) if event.get("event") == Event.end.value]
    # A later line may correct the end of a start.
    end_of_start = {repr(event.get("start")): event for event in ends}
    end_of_start.pop(repr(record.start), None)
    losses, furthest = 0, -1
    for end in (*end_of_start.values(), {"exit_code": LOST, "step": record.step}):
        step = end.get("step") or 0
        if end.get("exit_code") not in (LOST, None):
            losses = 0
        elif step > furthest:
            losses = 1
        else:
            losses += 1
        furthest = max(furthest, step)
    return losses


def _read_ended(run_dir: Path, wait_seconds: float) -> RunRecord | None:
    """Give the run's record once it has ended, or as it is after some seconds; None: there is none."""
    deadline = time.monotonic() + wait_seconds
    while True:
        record = read_run(run_dir)
        if record is None or record.state is not State.running or time.monotonic() >= deadline:
            return record
        time.sleep(_POLL_SECONDS)


def main() -> None:
    """Print the last start's number, or the verdict; without a folder, or with other arguments, how this is called."""
    match sys.argv[1:]:
        case [run_dir]:
            record = read_run(Path(run_dir))
            sys.stdout.write(f"{0 if record is None else record.start}\n")
        case [run_dir, *numbers] if len(numbers) == 3 and all(map(str.isdecimal, numbers)):
            start, launcher_code, max_restarts = map(int, numbers)
            verdict = judge(Path(run_dir), start, launcher_code, max_restarts)
            sys.stdout.write(f"{verdict.exit_code} {'again' if verdict.is_again else 'end'}\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
