"""The files of a run folder as a report needs them; `read` takes what has changed, and changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

import yaml

from hfdist.config.composition.files import read_config_text
from hfdist.config.task import TaskName
from hfdist.errors import HfdistError
from hfdist.records import RunFolder, RunRecord, read_run
from hfdist.tools.report.reading.follow import Follower
from hfdist.tools.report.reading.json_file import read_object
from hfdist.tools.report.reading.metric_lines import MetricLines
from hfdist.tools.report.reading.rank_steps import RankSteps
from hfdist.tools.report.reading.timeline import Span, read_spans

_MOST_SAMPLES = 1000
_MOST_ROLLOUTS = 64


class RunFiles:
    """The contents of a run's files so far.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._paths = folder, RunFolder(folder)
        # `.` has no name until it is resolved; a link keeps the name that the user gave it.
        self.name = folder.name or folder.resolve().name
        self.record: RunRecord | None = None
        self.spans: list[Span] = []
        self.plan: Mapping[str, object] = {}
        """What plan.json holds; so does `grade`."""
        self.grade: Mapping[str, object] = {}
        self.config: dict[str, object] | None = None
        """None: it cannot be read."""
        self.read_at = datetime.now(UTC)
        self.events: list[Mapping[str, object]] = []
        self.samples: deque[Mapping[str, object]] = deque(maxlen=_MOST_SAMPLES)
        self.rollouts: deque[Mapping[str, object]] = deque(maxlen=_MOST_ROLLOUTS)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._begin_metrics()
        self._begin_ranks()
        self._followers = [
            Follower(self._paths.metrics, self._begin_metrics, lambda line: self.metrics.add(line)),
            Follower(self._paths.events, self.events.clear, self.events.append),
            Follower(self._paths.ranks, self._begin_ranks, lambda line: self.ranks.add(line)),
            Follower(self._paths.samples, self.samples.clear, self.samples.append),
            Follower(self._paths.rollouts, self.rollouts.clear, self.rollouts.append),
        ]

    def read(self) -> bool:
        """Read what is new; whether there was anything."""
        self.read_at = datetime.now(UTC)
        is_new = False
        for follower in self._followers:
            is_new = follower.read() or is_new
        if self._has_changed(self._paths.record):
            self.record, is_new = read_run(self.folder) or self.record, True
        if self._has_changed(self._paths.config):
            self.config, is_new = _read_config(self._paths.config), True
        if self._has_changed(self._paths.timeline):
            self.spans, is_new = read_spans(self._paths.timeline), True
        if self._has_changed(self._paths.plan):
            self.plan, is_new = read_object(self._paths.plan), True
        if self._has_changed(self._paths.grade):
            self.grade, is_new = read_object(self._paths.grade), True
        return is_new

    @property
    def task(self) -> TaskName:
        """What the run trains; one that does not say it trains next tokens."""
        task = (self.config or {}).get("task")
        name = task.get("name") if isinstance(task, dict) else None
        return next((known for known in TaskName if known.value == name), TaskName.causal_lm)

    def _begin_metrics(self) -> None:
        self.metrics = MetricLines()

    def _begin_ranks(self) -> None:
        self.ranks = RankSteps()

    def _has_changed(self, path: Path) -> bool:
        try:
            stat = path.stat()
        except OSError:
            return False
        if not S_ISREG(stat.st_mode):
            return False
        stamp = (stat.st_size, stat.st_mtime_ns)
        has_changed, self._stamps[path] = self._stamps.get(path) != stamp, stamp
        return has_changed


def _read_config(path: Path) -> dict[str, object] | None:
    try:
        values = yaml.safe_load(read_config_text(path))
    except (HfdistError, OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else None
