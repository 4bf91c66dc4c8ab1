"""What is wrong with a series of figures: each detector sees them line by line, and judges with few, wide thresholds.

Levels are medians, and noise is the median distance of neighbours, so that neither an outlier nor a trend moves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from hfdist.records.lines import Line
from hfdist.tools.alerts.alert import Detection
from hfdist.units import count, size

_DEVIATION_OF_MEDIAN = 1.4826
"""Standard deviation of values that are normal, over the median of their distances from their level."""

_SPIKE_LINES = 64
"""Most earlier losses that make the level of a loss."""
_LEAST_SPIKE_LINES = 32
"""Fewer losses make no level."""
_SPIKE_NOISE, _SPIKE_SHARE = 8.0, 0.1
"""How far a loss is above its level, in units of its noise and of itself; both."""

_FIRST_NATS, _FIRST_SHARE = 3.0, 0.5
"""How far a loss is above the first one while there is no level yet: nats and share; both."""

_PLATEAU_SHARE, _PLATEAU_LINES = 0.3, 300
"""The newest part of the run, and the fewest lines in it."""
_PLATEAU_GAIN, _PLATEAU_ERRORS = 0.005, 4.0
"""Between the halves of that part: so much less than this share, by so many standard errors, is no gain."""
_PLATEAU_PARTS = 8
"""Parts of it, whose medians are compared."""
_MOST_MEANS = 512
"""Means that are kept of a run, however long it is: twice as many are joined in pairs."""

_DRIFT_LINES = 16
"""Lines whose median is a level of the gradient norm."""
_DRIFT_TIMES = 5.0
"""A norm that is so many times the lowest level is an alert."""
_DRIFT_LEVELS = 4
"""Levels between the lowest and the newest one; so many are left out at the beginning, too, where norms are large."""

_SLOWER = 0.75
"""Throughput below this share of the level before is an alert."""
_LEAST_LEVELS = 4
"""Fewer levels of throughput, but for the newest two, tell nothing."""

_LARGEST_MISMATCH = 0.5
"""Nats by which log-probabilities may differ between trainer and generators: a ratio of 1.6."""

_SAVES_SEEN = 4
"""More saves than this must be seen since old checkpoints are removed, to tell how the disk fills."""
_LATE_SAVES, _LATE_SECONDS = 2, 60.0
"""Intervals without a save, and time: less is no loss; both."""


def deviation_from_trend(values: Sequence[float]) -> float:
    """Give the standard deviation around a trend."""
    return _DEVIATION_OF_MEDIAN * median(abs(after - before) for before, after in pairwise(values)) / 2**0.5


class LossSpike:
    """Two of three losses are far above the level before; at the beginning, far above the first loss."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_SPIKE_LINES)
        self._are_high: deque[bool] = deque(maxlen=3)

    def see(self, loss: float) -> Detection | None:
        """Judge a loss."""
        detection = None
        if 0 < len(self._before) < _LEAST_SPIKE_LINES:
            detection = self._see_beginning(loss, self._before[0])
        elif self._before:
            before = list(self._before)
            level = median(before)
            # The larger of the noise around a trend and of that around the level.
            usual = max(
                deviation_from_trend(before), _DEVIATION_OF_MEDIAN * median(abs(value - level) for value in before)
            )
            self._are_high.append(loss - level > max(_SPIKE_NOISE * usual, _SPIKE_SHARE * abs(level)))
            if self._are_high[-1] and sum(self._are_high) >= 2:
                detection = Detection(
                    f"the loss has jumped from {level:.4g} to {loss:.4g} (its noise is {usual:.2g}); if it does not"
                    " come back, go on from an older checkpoint with a lower optimizer.lr",
                    {"loss": loss, "level": level, "noise": usual},
                )
        self._before.append(loss)
        return detection

    def _see_beginning(self, loss: float, first: float) -> Detection | None:
        self._are_high.append(loss - first > max(_FIRST_NATS, _FIRST_SHARE * abs(first)))
        if not self._are_high[-1] or sum(self._are_high) < 2:
            return None
        text = f"the loss began at {first:.4g} and is {loss:.4g}: start again with a lower optimizer.lr, or a warm-up"
        return Detection(text, {"loss": loss, "level": first})


class Plateau:
    """The loss has gained nothing in the newest part of the run, and its noise is too small to hide a gain."""

    def __init__(self) -> None:
        self._means: list[float] = []
        """Means of the losses of the whole run, each of equally many losses."""
        self._losses_in_mean = 1
        self._open: list[float] = []
        self._detection: Detection | None = None

    def see(self, loss: float) -> Detection | None:
        """Judge the run up to this loss."""
        self._open.append(loss)
        if len(self._open) == self._losses_in_mean:
            self._means.append(fmean(self._open))
            self._open = []
            if len(self._means) == 2 * _MOST_MEANS:
                self._means = [fmean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
                self._losses_in_mean *= 2
            self._detection = self._judge(int(_PLATEAU_SHARE * len(self._means)))
        return self._detection

    def _judge(self, num_means: int) -> Detection | None:
        num_lines = num_means * self._losses_in_mean
        if num_lines < _PLATEAU_LINES:
            return None
        # Of parts: losses that follow each other may be alike, which hides noise from its neighbours.
        length, half = num_means // _PLATEAU_PARTS, _PLATEAU_PARTS // 2
        newest = self._means[-length * _PLATEAU_PARTS :]
        parts = [median(newest[begin : begin + length]) for begin in range(0, len(newest), length)]
        earlier, later = fmean(parts[:half]), fmean(parts[half:])
        error = deviation_from_trend(parts) * (2 / half) ** 0.5
        if earlier - later + _PLATEAU_ERRORS * error >= _PLATEAU_GAIN * abs(later):
            return None
        return Detection(
            f"the loss has stayed at {later:.4g} for {num_lines:,} logged steps; another optimizer.lr, or an end: the"
            " model may have learned what it can from these data",
            {"loss": later, "gain": earlier - later, "lines": num_lines},
        )


class GradNormDrift:
    """The gradient norm has grown to a multiple of its lowest level."""

    def __init__(self) -> None:
        self._levels: list[float] = []
        self._open: list[float] = []
        self._detection: Detection | None = None

    def see(self, norm: float) -> Detection | None:
        """Judge a norm, as it was before it was clipped."""
        self._open.append(norm)
        if len(self._open) == _DRIFT_LINES:
            self._levels.append(median(self._open))
            self._open = []
            self._detection = self._judge()
        return self._detection

    def _judge(self) -> Detection | None:
        before = self._levels[max(_DRIFT_LEVELS, len(self._levels) // 10) : -_DRIFT_LEVELS]
        if len(before) < _DRIFT_LEVELS:
            return None
        lowest, now = min(before), min(self._levels[-2:])
        # Norms of 0, as of a loss without targets that count, are no level to grow from.
        if lowest == 0 or now <= _DRIFT_TIMES * lowest:
            return None
        return Detection(
            f"the gradient norm has grown to {now:.3g}, which is {now / lowest:.1f} times its lowest level; before it"
            " diverges: a lower optimizer.lr or train.max_grad_norm",
            {"grad_norm": now, "lowest": lowest},
        )


class FallingThroughput:
    """Training is much slower than it was."""

    def __init__(self) -> None:
        self._levels: list[float] = []

    def see(self, tokens_per_second: Sequence[float]) -> Detection | None:
        """Judge the lines of some seconds."""
        before = median(self._levels[:-1]) if len(self._levels) > _LEAST_LEVELS else 0.0
        self._levels.append(median(tokens_per_second))
        now = max(self._levels[-2:])
        if now >= _SLOWER * before:
            return None
        return Detection(
            f"training has slowed down from {before:,.0f} to {now:,.0f} tokens/s; ranks.jsonl tells whether ranks wait"
            " for data or for a slow rank, and a machine may be too hot or have other work",
            {"tokens_per_second": now, "before": before},
        )


class DiskFilling:
    """The disk has little room, or will be full before the end.

    Args:
        num_kept: how many checkpoints stay: before there are more, the disk fills for that reason.
        max_steps: number of the run's steps; None: not known.
    """

    def __init__(self, num_kept: int, max_steps: int | None) -> None:
        self._num_kept, self._max_steps = num_kept, max_steps
        self._free_bytes: list[tuple[int, int]] = []

    def see(self, step: int, save_bytes: int, free_bytes: int) -> Detection | None:
        """Judge the disk after a save."""
        self._free_bytes.append((step, free_bytes))
        figures = {"free_bytes": free_bytes, "save_bytes": save_bytes}
        hint = "free space, or a smaller checkpoint.keep"
        if free_bytes < 2 * save_bytes:
            sizes = f"{size(free_bytes)} are free, and a save has {size(save_bytes)}"
            return Detection(f"the disk has no room for two saves: {sizes}; {hint}", figures)
        settled = self._free_bytes[self._num_kept :]
        if len(settled) <= _SAVES_SEEN or self._max_steps is None:
            return None
        (first_step, first_free), bytes_a_step = settled[0], 0.0
        if step > first_step:
            bytes_a_step = (first_free - free_bytes) / (step - first_step)
        # Another save is written before an old one is removed.
        if bytes_a_step <= 0 or free_bytes - save_bytes >= bytes_a_step * (self._max_steps - step):
            return None
        full_at = step + int((free_bytes - save_bytes) / bytes_a_step)
        sizes = f"{size(free_bytes)} are free, and 1000 steps take {size(1000 * bytes_a_step)}"
        return Detection(
            f"the disk will be full at about step {full_at:,} of {self._max_steps:,}: {sizes}; {hint}",
            figures | {"full_at_step": full_at},
        )


def see_mirror(line: Line) -> Detection | None:
    """Judge the line of an upload to the mirror."""
    step, newest, failures = int(line["mirror/step"]), line.get("mirror/newest_step"), int(line["mirror/failures"])
    if not line["mirror/failed"]:
        return None
    there = "no checkpoint" if newest is None else f"step {int(newest):,} as its newest"
    what = "cannot be tidied" if newest == step else f"has not got step {step:,}"
    figures = {"failures": failures} | ({} if newest is None else {"newest_step": int(newest)})
    text = f"the mirror {what}, and has {there}; {count(failures, 'upload')} failed so far, and a warning says why"
    return Detection(text, figures)


def see_mismatch(mismatch: float) -> Detection | None:
    """Judge how far the policy is from those whose answers it trains on, in nats a token."""
    if mismatch <= _LARGEST_MISMATCH:
        return None
    return Detection(
        f"log-probabilities of answers are {mismatch:.2g} from those of the generators that gave them, in the mean of"
        " tokens; a lower task.max_staleness or optimizer.lr, or the generators compute otherwise",
        {"mismatch": mismatch},
    )


class OldCheckpoint:
    """The newest checkpoint is older than `save_every` steps allow."""

    def __init__(self, save_every: int) -> None:
        self._save_every = save_every
        self._saved: int | None = None
        self._seconds = 0.0

    def saved(self, step: int) -> None:
        """Note a save."""
        self._saved, self._seconds = step, 0.0

    def see(self, step: int, seconds: float) -> Detection | None:
        """Judge a step; so long it took, with those that were not logged."""
        if self._saved is None or step < self._saved:
            # Where this start began, or where it went back to.
            self.saved(step - 1)
        assert self._saved is not None
        self._seconds += seconds
        if step - self._saved <= _LATE_SAVES * self._save_every or self._seconds < _LATE_SECONDS:
            return None
        return Detection(
            f"nothing has been saved for {step - self._saved:,} steps, with checkpoint.every={self._save_every}; the"
            " disk may be slow, or steps are skipped",
            {"saved_step": self._saved, "save_every": self._save_every},
        )
