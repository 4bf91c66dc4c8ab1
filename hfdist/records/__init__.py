"""What a run leaves in its folder for people, schedulers and tools: its state, its events and its metrics.

Loads no torch, so that a tool may read them anywhere.
"""

from hfdist.records.events import Event, add_event
from hfdist.records.lines import read_lines
from hfdist.records.rank_lines import RankColumn
from hfdist.records.recorder import RunRecorder
from hfdist.records.run_end import record_ranks, recording_end
from hfdist.records.run_file import RunRecord, State, read_run
from hfdist.records.run_folder import RunFolder
from hfdist.records.versions import PACKAGES, find_versions

__all__ = [
    "PACKAGES",
    "Event",
    "RankColumn",
    "RunFolder",
    "RunRecord",
    "RunRecorder",
    "State",
    "add_event",
    "find_versions",
    "read_lines",
    "read_run",
    "record_ranks",
    "recording_end",
]
