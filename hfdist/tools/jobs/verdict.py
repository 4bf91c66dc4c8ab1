"""How a run ended, for the script of its job: launchers hide exit codes, so they are read from the run's folder.

python -m hfdist.tools.jobs.verdict RUN_DIR                            prints the number of the last start; 0: none
python -m hfdist.tools.jobs.verdict RUN_DIR START CODE MAX_RESTARTS    after a launcher's CODE: `75 again`, or `3 end`

START is the number of the last start before the launcher's. `again`: the same command goes on from the last checkpoint,
and should be given again: after 75, and after a lost rank, as long as the run gets further (see `num_losses`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hfdist.errors import PeerError, PreemptedError
from hfdist.records import Event, RunFolder, RunRecord, State, read_lines, read_run

WAIT_SECONDS = 10.0
"""How long rank 0's last word may take: rank 0 may write it on another machine, to a shared disk."""
_POLL_SECONDS = 0.5
LOST = PeerError.exit_code


def judge(
    run_dir: Path, start: int, launcher_code: int, max_restarts: int, *, wait_seconds: float = WAIT_SECONDS
) -> tuple[int, bool]:
    """Give the run's exit code, and whether the same command should be given again.

    Args:
        run_dir: the run's folder.
        start: number of the last start before this one; 0: there was none.
        launcher_code: exit code of the launcher. It counts where the run was refused before it had a record.
        max_restarts: number of losses in a row after which the run is started again, though it gets no further.
        wait_seconds: how long to wait for the end of a start that seems to run.
    """
    record = _read_ended(run_dir, wait_seconds)
    if record is None or record.start <= start:
        return launcher_code or 1, False
    if record.state in (State.running, State.lost) or record.exit_code == LOST:
        return LOST, num_losses(run_dir, record) <= max_restarts
    code = record.exit_code or 0
    return code, code == PreemptedError.exit_code


def num_losses(run_dir: Path, record: RunRecord) -> int:
    """Count the lost starts in a row, each of which got no further than those before; 1: only the last.

    Args:
        run_dir: the run's folder.
        record: the record of the last start, which was lost; its end may not be among the events.
    """
    ends = [event for event in read_lines(RunFolder(run_dir).events) if event.get("event") == Event.end.value]
    # The end of a start may be corrected by a later line.
    of_starts = {repr(event.get("start")): (event.get("exit_code"), event.get("step") or 0) for event in ends}
    of_starts.pop(repr(record.start), None)
    losses, furthest = 0, -1
    for exit_code, step in [*of_starts.values(), (LOST, record.step)]:
        losses = 0 if exit_code not in (LOST, None) else 1 if step > furthest else losses + 1
        furthest = max(furthest, step)
    return losses


def _read_ended(run_dir: Path, wait_seconds: float) -> RunRecord | None:
    deadline = time.monotonic() + wait_seconds
    while True:
        record = read_run(run_dir)
        if record is None or record.state is not State.running or time.monotonic() >= deadline:
            return record
        time.sleep(_POLL_SECONDS)


def main() -> None:
    """Print the last start's number, or the verdict."""
    arguments = sys.argv[1:]
    if len(arguments) == 1:
        record = read_run(Path(arguments[0]))
        sys.stdout.write(f"{0 if record is None else record.start}\n")
    elif len(arguments) == 4 and all(number.isdecimal() for number in arguments[1:]):
        start, launcher_code, max_restarts = map(int, arguments[1:])
        code, is_again = judge(Path(arguments[0]), start, launcher_code, max_restarts)
        sys.stdout.write(f"{code} {'again' if is_again else 'end'}\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
