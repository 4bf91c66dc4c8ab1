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
"""Keys of training lines whose values become curves."""
TASK_FIGURES = (
    "reward", "rewards/accuracies", "accuracies", "rewards/margins", "margins", "rewards/chosen", "rewards/rejected",
    "reward_std", "dead_groups", "kl", "entropy", "clipped_ratios", "mismatch", "largest_ratio", "completion_tokens",
    "cut_off",
)  # fmt: skip
"""Keys of figures of preferences and rewards, beside `rewards/NAME`; evaluations write them with `eval_` before."""
_REWARDS = "rewards/"
_MOST_FIGURES = 32
"""Most keys of one kind of figure: a file may have any number of them."""
_HELD_OUT_PREFIX, _POOL_PREFIX = "eval_", "data/"
"""What the keys of evaluations begin with, and those of a pool of documents: `data/POOL/share`."""
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
        """Tokens that the run had read at each training line; they never fall."""
        self.seconds: list[float] = []
        """Seconds that the steps up to each training line took, without loading, evaluations and saves."""
        self.columns: dict[str, list[float | None]] = {key: [] for key in CURVES}
        """Values of training lines by key, each list as long as `steps`; None: no finite number."""
        self.held_out: dict[str, list[Point]] = {}
        """Points of each held-out loss over the steps, by key."""
        self.figures: dict[str, list[Point]] = {}
        """Points of each figure of preferences and rewards in training lines, by key."""
        self.held_out_figures: dict[str, list[Point]] = {}
        """Points of the same figures in evaluations, by the key without `eval_`."""
        self.shares: dict[str, dict[str, float]] = {}
        """What was read of each pool of documents up to the last save: share, tokens, epochs, filled."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line; a training line whose step is no later than the last one's adds nothing to the curves."""
        step = number(line.get("step"))
        if step is None or step < 0:
            return
        if "loss" in line and (not self.steps or step > self.steps[-1]):
            self._add_training(line, step)
        for key, value in line.items():
            if len(key) <= _LONGEST_KEY:
                self._add_figure(key, step, value)

    def _add_training(self, line: Mapping[str, object], step: float) -> None:
        """Add a training line to the columns, with the tokens and the seconds up to its step."""
        tokens = number(line.get("tokens")) or 0.0
        seconds_a_step = max(number(line.get("step_seconds")) or 0.0, 0.0)
        if self.steps:
            tokens = max(tokens, self.tokens[-1])
            seconds = self.seconds[-1] + seconds_a_step * (step - self.steps[-1])
        else:
            # The first line counts as one step: a run that goes on from another run's checkpoint begins anywhere.
            tokens, seconds = max(tokens, 0.0), seconds_a_step
        self.steps.append(step)
        self.tokens.append(tokens)
        self.seconds.append(seconds)
        for key in CURVES:
            self.columns[key].append(number(line.get(key)))

    def _add_figure(self, key: str, step: float, value: object) -> None:
        """Add a value to the held-out losses, the figures or the pools, by what its key begins with."""
        if key.startswith(_HELD_OUT_PREFIX):
            name = key.removeprefix(_HELD_OUT_PREFIX)
            if name == LOSS or name.endswith(f"_{LOSS}"):
                _add_point(self.held_out, key, step, value)
            elif _is_figure(name):
                _add_point(self.held_out_figures, name, step, value)
        elif _is_figure(key):
            _add_point(self.figures, key, step, value)
        elif key.startswith(_POOL_PREFIX):
            self._add_to_pool(key.removeprefix(_POOL_PREFIX), number(value))

    def _add_to_pool(self, key: str, value: float | None) -> None:
        # A pool's name may have slashes of its own.
        pool, _, figure = key.rpartition("/")
        has_room = pool in self.shares or len(self.shares) < _MOST_POOLS
        if value is not None and figure in _POOL_FIGURES and has_room:
            self.shares.setdefault(pool, {})[figure] = value

    def curve(self, key: str) -> list[Point]:
        """Give the points of one of CURVES over the steps; a value that is missing, or not finite, is a gap."""
        return list(zip(self.steps, self.columns[key], strict=True))

    def points_over(self, axis: list[float], points: list[Point]) -> list[Point]:
        """Give points over the steps as points over `tokens` or `seconds`, which is the `axis`."""
        return [(self.at_step(axis, step), y) for step, y in points]

    def at_step(self, axis: list[float], step: float) -> float:
        """Give the value of an axis, `tokens` or `seconds`, at a step; between two lines it lies on a straight line."""
        if not self.steps or step <= 0:
            return 0.0
        after = bisect.bisect_left(self.steps, step)
        if after == len(self.steps):
            return axis[-1]
        step_before, value_before = (self.steps[after - 1], axis[after - 1]) if after else (0.0, 0.0)
        # This is above 0: steps grow, and `step`, which is above 0, is not after the next line's step.
        width = self.steps[after] - step_before
        return value_before + (axis[after] - value_before) * ((step - step_before) / width)


def _is_figure(key: str) -> bool:
    return key in TASK_FIGURES or key.startswith(_REWARDS)


def _add_point(curves: dict[str, list[Point]], key: str, step: float, value: object) -> None:
    """Add a point to the curve of its key; a step no later than the last point's, or one key too many, adds nothing."""
    if key not in curves and len(curves) >= _MOST_FIGURES:
        return
    points = curves.setdefault(key, [])
    if not points or step > points[-1][0]:
        points.append((step, number(value)))
