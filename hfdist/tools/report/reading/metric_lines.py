"""The figures of a run over its steps, from the lines of metrics.jsonl."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from hfdist.tools.report.reading.downsample import Point
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
_HELD_OUT_PREFIX, _POOL_PREFIX = "eval_", "data/"
_LONGEST_KEY = 200
"""Most characters of a key: hfdist writes no longer ones, and a line may have one of megabytes."""
_MOST_POOLS = 1000
_POOL_FIGURES = ("share", "tokens", "epochs", "filled")


class MetricLines:
    """The lines of `metrics.jsonl` so far, as curves."""

    def __init__(self) -> None:
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

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line; one whose training step is not a later one has no part in the curves."""
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
            if len(key) <= _LONGEST_KEY:
                self._add_figure(key, step, value)

    def _add_figure(self, key: str, step: float, value: object) -> None:
        if key.startswith(_HELD_OUT_PREFIX):
            name = key.removeprefix(_HELD_OUT_PREFIX)
            if name == LOSS or name.endswith(f"_{LOSS}"):
                _add_point(self.held_out, key, step, value)
            elif _is_figure(name):
                _add_point(self.held_out_figures, name, step, value)
        elif _is_figure(key):
            _add_point(self.figures, key, step, value)
        elif key.startswith(_POOL_PREFIX) and (found := number(value)) is not None:
            pool, _, figure = key.removeprefix(_POOL_PREFIX).rpartition("/")
            if figure in _POOL_FIGURES and (pool in self.shares or len(self.shares) < _MOST_POOLS):
                self.shares.setdefault(pool, {})[figure] = found

    def curve(self, key: str) -> list[Point]:
        """Give the values of one of CURVES by step; one that is not there, or not finite, is a gap."""
        return list(zip(self.steps, self.columns[key], strict=True))

    def over(self, axis: list[float], points: list[Point]) -> list[Point]:
        """Give points by step as points by `tokens` or `seconds`, which lie on a line between two steps."""
        return [(self.at_step(axis, step), y) for step, y in points]

    def at_step(self, axis: list[float], step: float) -> float:
        """Give the tokens or seconds at a step."""
        if not self.steps or step <= 0:
            return 0.0
        after = bisect.bisect_left(self.steps, step)
        if after == len(self.steps):
            return axis[-1]
        left, low = (self.steps[after - 1], axis[after - 1]) if after else (0.0, 0.0)
        width = self.steps[after] - left
        return low + (axis[after] - low) * ((step - left) / width if width else 1.0)


def _is_figure(key: str) -> bool:
    return key in TASK_FIGURES or key.startswith(_REWARDS)


def _add_point(curves: dict[str, list[Point]], key: str, step: float, value: object) -> None:
    """Add a point; a step that was there before, or a key too many, adds none."""
    if key not in curves and len(curves) >= _MOST_FIGURES:
        return
    points = curves.setdefault(key, [])
    if not points or step > points[-1][0]:
        points.append((step, number(value)))
