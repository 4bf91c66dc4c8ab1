"""The files of a run folder, as a report needs them; a reading takes what is new, and changes no file."""

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
"""Most lines of samples and of rollouts in memory: the newest ones."""


class RunFiles:
    """What the files of a run say so far.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._paths = folder, RunFolder(folder)
        # `.` has no name until it is resolved; a link keeps the name that the user gave it.
        self.name = folder.name or folder.resolve().name
        self.record: RunRecord | None = None
        """The content of run.json; None: it could not be read so far."""
        self.spans: list[Span] = []
        """The recorded step of a pipeline; empty: there is none."""
        self.plan: Mapping[str, object] = {}
        """The content of the file of the plan; empty: there is none."""
        self.grade: Mapping[str, object] = {}
        """The content of the file of the plan's grade; empty: there is none."""
        self.config: dict[str, object] | None = None
        """The run's config; None: it cannot be read."""
        self.read_at = datetime.now(UTC)
        """Time of the last reading."""
        self.events: list[Mapping[str, object]] = []
        self.samples: deque[Mapping[str, object]] = deque(maxlen=_MOST_SAMPLES)
        self.rollouts: deque[Mapping[str, object]] = deque(maxlen=_MOST_ROLLOUTS)
        # Size and time of change of each file that is read whole.
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._begin_metrics()
        self._begin_ranks()
        # `metrics` and `ranks` become new objects when their file is replaced: the lambdas find the newest ones.
        self._followers = [
            Follower(self._paths.metrics, self._begin_metrics, lambda line: self.metrics.add(line)),
            Follower(self._paths.events, self.events.clear, self.events.append),
            Follower(self._paths.ranks, self._begin_ranks, lambda line: self.ranks.add(line)),
            Follower(self._paths.samples, self.samples.clear, self.samples.append),
            Follower(self._paths.rollouts, self.rollouts.clear, self.rollouts.append),
        ]

    def read(self) -> bool:
        """Read what is new; give whether any file has changed."""
        self.read_at = datetime.now(UTC)
        # A list, and not a generator in `any`: each file must be read.
        has_new_lines = [follower.read() for follower in self._followers]
        paths = self._paths
        whole_files = (paths.record, paths.config, paths.timeline, paths.plan, paths.grade)
        changed = {path for path in whole_files if self._has_changed(path)}
        if paths.record in changed:
            # A record that cannot be read now is being written: the earlier one stays.
            self.record = read_run(self.folder) or self.record
        if paths.config in changed:
            self.config = _read_config(paths.config)
        if paths.timeline in changed:
            self.spans = read_spans(paths.timeline)
        if paths.plan in changed:
            self.plan = read_object(paths.plan)
        if paths.grade in changed:
            self.grade = read_object(paths.grade)
        return any(has_new_lines) or bool(changed)

    @property
    def task(self) -> TaskName:
        """What the run trains, by its config; a config that does not say it trains next tokens."""
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
