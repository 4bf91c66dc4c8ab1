"""The files of a run folder as a report needs them; `read` takes what has changed, and changes nothing."""

from __future__ import annotations

import bisect
import json
import re
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import yaml

from hfdist.config.composition.files import read_config_text
from hfdist.config.task import TaskName
from hfdist.errors import HfdistError
from hfdist.records import RunFolder, RunRecord, read_run
from hfdist.tools.report.reading.downsample import Point
from hfdist.tools.report.reading.follow import Follower
from hfdist.tools.report.reading.rank_steps import RankSteps
from hfdist.tools.report.text import number

LOSS, HELD_OUT = "loss", "eval_loss"
CURVES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "step_seconds", "expert_load_max", "energy_kwh",
    "cost",
)  # fmt: skip
"""Keys of training lines that are kept."""
TASK_FIGURES = (
    "reward", "rewards/accuracies", "accuracies", "rewards/margins", "margins", "rewards/chosen", "rewards/rejected",
    "reward_std", "dead_groups", "kl", "entropy", "clipped_ratios", "mismatch", "largest_ratio", "completion_tokens",
    "cut_off",
)  # fmt: skip
"""Keys of what is measured of preferences and rewards; of evaluations with `eval_` before them. `rewards/NAME`, too."""
_REWARDS = "rewards/"
_MOST_FIGURES = 32
_MOST_BYTES = 1 << 26
"""Most bytes of a file that is read whole."""
_MOST_SAMPLES = 1000
_MOST_ROLLOUTS = 64
_EVALUATION = re.compile(r"eval_(?:.+_)?loss")
_NUM_KEYS = 256
"""Keys whose kind is kept: lines have the same ones again and again."""
_LONGEST_KEY = 200
"""Most characters of a key: hfdist writes no longer ones, and a line may have one of megabytes."""
_MOST_POOLS = 1000
_POOL_FIGURES = ("share", "tokens", "epochs", "filled")


class Span(NamedTuple):
    """An action of a rank in the recorded step of a pipeline."""

    rank: int
    kind: str
    microbatch: int | None
    start_ms: float
    length_ms: float


class RunFiles:
    """The contents of a run's files so far.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._paths = folder, RunFolder(folder)
        # Of `.`, too, and of a link the name that the user gave it.
        self.name = folder.name or folder.resolve().name
        self.record: RunRecord | None = None
        self.spans: list[Span] = []
        self.plan: Mapping[str, object] = {}
        """What plan.json holds; so does `grade`."""
        self.grade: Mapping[str, object] = {}
        self.config: dict[str, object] | None = None
        """None: it cannot be read."""
        self.read_at = datetime.now(UTC)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._begin_metrics()
        self._begin_events()
        self._begin_ranks()
        self._begin_samples()
        self._begin_rollouts()
        self._followers = [
            Follower(self._paths.metrics, self._begin_metrics, self._take_metrics),
            Follower(self._paths.events, self._begin_events, lambda line: self.events.append(line)),
            Follower(self._paths.ranks, self._begin_ranks, lambda line: self.ranks.add(line)),
            Follower(self._paths.samples, self._begin_samples, lambda line: self.samples.append(line)),
            Follower(self._paths.rollouts, self._begin_rollouts, lambda line: self.rollouts.append(line)),
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
            self.spans, is_new = _read_spans(self._paths.timeline), True
        for path in (self._paths.plan, self._paths.grade):
            if self._has_changed(path):
                content = _read_json(path)
                setattr(self, path.stem, content if isinstance(content, dict) else {})
                is_new = True
        return is_new

    @property
    def task(self) -> TaskName:
        """What the run trains; one that does not say it trains next tokens."""
        task = (self.config or {}).get("task")
        name = task.get("name") if isinstance(task, dict) else None
        return next((known for known in TaskName if known.value == name), TaskName.causal_lm)

    def curve(self, key: str) -> list[Point]:
        """Give the values of one of CURVES by step; one that is not there, or not finite, is a gap."""
        return list(zip(self.steps, self.columns[key], strict=True))

    def on(self, axis: list[float], points: list[Point]) -> list[Point]:
        """Give points by step as points by `tokens` or `seconds`, which lie on a line between two steps."""
        return [(self.place(axis, step), y) for step, y in points]

    def place(self, axis: list[float], step: float) -> float:
        """Give the tokens or seconds at a step."""
        if not self.steps or step <= 0:
            return 0.0
        after = bisect.bisect_left(self.steps, step)
        if after == len(self.steps):
            return axis[-1]
        left, low = (self.steps[after - 1], axis[after - 1]) if after else (0.0, 0.0)
        width = self.steps[after] - left
        return low + (axis[after] - low) * ((step - left) / width if width else 1.0)

    def _begin_metrics(self) -> None:
        self.steps: list[float] = []
        """Step of each training line."""
        self.tokens: list[float] = []
        self.seconds: list[float] = []
        """Seconds that the steps up to each training line took, without loading, evaluations and saves."""
        self.columns: dict[str, list[float | None]] = {key: [] for key in CURVES}
        """Values of training lines by key, each list as long as `steps`; None: no finite number."""
        self.held_out: dict[str, list[Point]] = {}
        """Held-out losses, by key."""
        self.figures: dict[str, list[Point]] = {}
        """What training lines say of preferences and rewards, by key."""
        self.held_out_figures: dict[str, list[Point]] = {}
        """What evaluations say of preferences and rewards, by the key without `eval_`."""
        self.shares: dict[str, dict[str, float]] = {}
        """What was read of each pool of documents, at the last save."""

    def _begin_events(self) -> None:
        self.events: list[Mapping[str, object]] = []

    def _begin_ranks(self) -> None:
        self.ranks = RankSteps()

    def _begin_samples(self) -> None:
        self.samples: deque[Mapping[str, object]] = deque(maxlen=_MOST_SAMPLES)

    def _begin_rollouts(self) -> None:
        self.rollouts: deque[Mapping[str, object]] = deque(maxlen=_MOST_ROLLOUTS)

    def _take_metrics(self, line: Mapping[str, object]) -> None:
        step = number(line.get("step"))
        if step is None or step < 0:
            return
        if "loss" in line and (not self.steps or step > self.steps[-1]):
            before = (self.steps[-1], self.tokens[-1], self.seconds[-1]) if self.steps else (0.0, 0.0, 0.0)
            self.steps.append(step)
            self.tokens.append(max(number(line.get("tokens")) or 0.0, before[1]))
            a_step = number(line.get("step_seconds")) or 0.0
            # How many steps lie before the first line is not known where a run goes on from another one's checkpoint.
            self.seconds.append(before[2] + max(a_step, 0.0) * (step - before[0] if len(self.steps) > 1 else 1.0))
            for key in CURVES:
                self.columns[key].append(number(line.get(key)))
        for key, value in line.items():
            kind = _kind_of(key) if len(key) <= _LONGEST_KEY else _Kind.other
            if kind is _Kind.held_out:
                _add(self.held_out, key, step, value)
            elif kind is _Kind.figure:
                _add(self.figures, key, step, value)
            elif kind is _Kind.held_out_figure:
                _add(self.held_out_figures, key.removeprefix("eval_"), step, value)
            elif kind is _Kind.share and (found := number(value)) is not None:
                pool, _, figure = key.removeprefix("data/").rpartition("/")
                if figure in _POOL_FIGURES and (pool in self.shares or len(self.shares) < _MOST_POOLS):
                    self.shares.setdefault(pool, {})[figure] = found

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


class _Kind(Enum):
    """What a line of metrics says under a key, besides CURVES."""

    held_out = auto()
    figure = auto()
    held_out_figure = auto()
    share = auto()
    other = auto()


@lru_cache(_NUM_KEYS)
def _kind_of(key: str) -> _Kind:
    if _EVALUATION.fullmatch(key):
        return _Kind.held_out
    if _is_figure(key):
        return _Kind.figure
    if _is_figure(key.removeprefix("eval_")):
        return _Kind.held_out_figure
    return _Kind.share if key.startswith("data/") else _Kind.other


def _is_figure(key: str) -> bool:
    return key in TASK_FIGURES or key.startswith(_REWARDS)


def _add(curves: dict[str, list[Point]], key: str, step: float, value: object) -> None:
    """Add a point; a step that was there before, or a key too many, adds none."""
    if key not in curves and len(curves) >= _MOST_FIGURES:
        return
    points = curves.setdefault(key, [])
    if not points or step > points[-1][0]:
        points.append((step, number(value)))


def _read_config(path: Path) -> dict[str, object] | None:
    try:
        values = yaml.safe_load(read_config_text(path))
    except (HfdistError, OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else None


def _read_json(path: Path) -> object:
    """Read a file of JSON; None: it cannot be read."""
    try:
        return None if path.stat().st_size > _MOST_BYTES else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _read_spans(path: Path) -> list[Span]:
    """Read a Chrome trace; events that are no spans are left out."""
    content = _read_json(path)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    found = [_to_span(event) for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    return sorted((span for span in found if span is not None), key=lambda span: (span.rank, span.start_ms))


def _to_span(event: Mapping[str, object]) -> Span | None:
    rank, start, length = (number(event.get(key)) for key in ("tid", "ts", "dur"))
    kind, args = event.get("cat"), event.get("args")
    if event.get("ph") != "X" or not isinstance(kind, str) or rank is None or start is None or length is None:
        return None
    microbatch = number(args.get("microbatch")) if isinstance(args, dict) else None
    # At the left edge, by the clock of a GPU, rounding gives a little less than zero.
    own = None if microbatch is None else int(microbatch)
    return Span(int(rank), kind, own, max(start, 0.0) / 1e3, max(length, 0.0) / 1e3)
