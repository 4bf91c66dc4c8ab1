"""What a run leaves in its folder for people, schedulers and tools: its state, its events and its metrics.

Loads no torch, so that a tool may read them anywhere.
"""

from hfdist.records.events import EVENTS, Event, add_event
from hfdist.records.lines import read_lines
from hfdist.records.rank_lines import RANKS, RankColumn
from hfdist.records.recorder import PACKAGES, RunRecorder, find_versions, record_ranks, recording_end
from hfdist.records.run_file import RUN_FILE, RunRecord, State, read_run

METRICS = "metrics.jsonl"
"""One line for each logged step of the training that led to the present weights; see docs/records.md."""
PLAN, GRADE = "plan.json", "grade.json"
"""What the run was planned to need (docs/plan.md), and how that compares with what it has measured."""

__all__ = [
    "EVENTS",
    "GRADE",
    "METRICS",
    "PACKAGES",
    "PLAN",
    "RANKS",
    "RUN_FILE",
    "Event",
    "RankColumn",
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
