"""Detectors of what goes wrong in a run: each sees one kind of figure, line by line, and judges by wide thresholds.

A level is a median of figures, and their noise is the median distance of neighbours, so that neither an outlier nor a
trend moves them much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from hfdist.records.lines import Line
from hfdist.tools.alerts.alert import Detection
from hfdist.units import count, size

_DEVIATION_OF_MEDIAN = 1.4826
"""Standard deviation of normal values, as a multiple of the median of their distances from their level."""

_SPIKE_LINES = 64
"""Most earlier losses that make the level of a loss."""
_LEAST_SPIKE_LINES = 32
"""Least number of losses that make a level."""
_SPIKE_NOISE, _SPIKE_SHARE = 8.0, 0.1
"""A high loss lies above its level by more than so many times the noise, and by more than this share of the level."""

_FIRST_NATS, _FIRST_SHARE = 3.0, 0.5
"""Before there is a level, a high loss lies above the first one by more than so many nats and than this share of it."""

_PLATEAU_SHARE, _PLATEAU_LINES = 0.3, 300
"""Share of the run that is its newest part, and the least number of lines in that part for a judgement."""
_PLATEAU_GAIN, _PLATEAU_ERRORS = 0.005, 4.0
"""A gain from the part's first half to its second is at least this share of the loss; so many standard errors are added
to what was measured, so that noise hides no gain."""
_PLATEAU_PARTS = 8
"""Number of pieces of that part, whose medians are compared."""
_MOST_MEANS = 512
"""Number of means that are kept of a run, however long it is: if there are twice as many, they are joined in pairs."""

_DRIFT_LINES = 16
"""Number of lines whose median is a level of the gradient norm."""
_DRIFT_TIMES = 5.0
"""A level that is more than so many times the lowest level is an alert."""
_DRIFT_LEVELS = 4
"""Number of newest levels that cannot be the lowest one, and of first levels, in which norms are large."""

_SLOWER = 0.75
"""Throughput below this share of the level before is an alert."""
_LEAST_LEVELS = 4
"""More levels of throughput than this must be known before the newest one is judged."""

_LARGEST_MISMATCH = 0.5
"""Nats by which log-probabilities may differ between trainer and generators: a ratio of 1.6."""

_SAVES_SEEN = 4
"""More saves than this, since old checkpoints are removed, must be seen to tell how the disk fills."""
_LATE_SAVES, _LATE_SECONDS = 2, 60.0
"""A checkpoint is old after more than so many intervals of saves, and at least this time: less is no loss."""


def deviation_from_trend(values: Sequence[float]) -> float:
    """Give the standard deviation of values around their trend, from the distances of neighbours."""
    # The difference of two values with the same deviation has sqrt(2) times as large a deviation.
    return _DEVIATION_OF_MEDIAN * median(abs(after - before) for before, after in pairwise(values)) / 2**0.5


class LossSpike:
    """A detector of jumps: two of three losses lie far above the level before, or above the first loss of the run."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_SPIKE_LINES)
        self._are_high: deque[bool] = deque(maxlen=3)

    def see(self, loss: float) -> Detection | None:
        """Judge a loss; None: it is no jump."""
        detection = None
        if 0 < len(self._before) < _LEAST_SPIKE_LINES:
            detection = self._see_early(loss, self._before[0])
        elif self._before:
            detection = self._see_later(loss)
        self._before.append(loss)
        return detection

    def _see_later(self, loss: float) -> Detection | None:
        """Judge a loss by the level and the noise of the losses before."""
        before = list(self._before)
        level = median(before)
        deviation_from_level = _DEVIATION_OF_MEDIAN * median(abs(value - level) for value in before)
        noise = max(deviation_from_trend(before), deviation_from_level)
        if not self._are_two_high(loss - level > max(_SPIKE_NOISE * noise, _SPIKE_SHARE * abs(level))):
            return None
        return Detection(
            f"the loss has jumped from {level:.4g} to {loss:.4g} (its noise is {noise:.2g}); if it does not"
            " come back, go on from an older checkpoint with a lower optimizer.lr",
            {"loss": loss, "level": level, "noise": noise},
        )

    def _see_early(self, loss: float, first: float) -> Detection | None:
        """Judge a loss by the first one of the run, as long as there is no level."""
        if not self._are_two_high(loss - first > max(_FIRST_NATS, _FIRST_SHARE * abs(first))):
            return None
        text = f"the loss began at {first:.4g} and is {loss:.4g}: start again with a lower optimizer.lr, or a warm-up"
        return Detection(text, {"loss": loss, "level": first})

    def _are_two_high(self, is_high: bool) -> bool:
        """Whether this loss is high, and one of the two before it was high, too: one alone may be chance."""
        self._are_high.append(is_high)
        return is_high and sum(self._are_high) >= 2


class Plateau:
    """A detector of a loss that has gained nothing in the newest part of the run, and whose noise hides no gain."""

    def __init__(self) -> None:
        self._means: list[float] = []
        """Means of the losses of the whole run, each of equally many losses."""
        self._losses_in_mean = 1
        self._open: list[float] = []
        """Losses of the next mean."""
        self._detection: Detection | None = None

    def see(self, loss: float) -> Detection | None:
        """Judge the run up to this loss; None: it is on no plateau."""
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
        # Noise is measured between pieces: losses that follow each other may be alike, and hide it.
        length, half = num_means // _PLATEAU_PARTS, _PLATEAU_PARTS // 2
        newest = self._means[-length * _PLATEAU_PARTS :]
        pieces = [median(newest[begin : begin + length]) for begin in range(0, len(newest), length)]
        earlier, later = fmean(pieces[:half]), fmean(pieces[half:])
        # The standard error of the difference of two means of `half` pieces each.
        error = deviation_from_trend(pieces) * (2 / half) ** 0.5
        largest_gain = earlier - later + _PLATEAU_ERRORS * error
        if largest_gain >= _PLATEAU_GAIN * abs(later):
            return None
        return Detection(
            f"the loss has stayed at {later:.4g} for {num_lines:,} logged steps; another optimizer.lr, or an end: the"
            " model may have learned what it can from these data",
            {"loss": later, "gain": earlier - later, "lines": num_lines},
        )


class GradNormDrift:
    """A detector of a gradient norm that has grown to a multiple of its lowest level."""

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
        num_first = max(_DRIFT_LEVELS, len(self._levels) // 10)
        before = self._levels[num_first:-_DRIFT_LEVELS]
        if len(before) < _DRIFT_LEVELS:
            return None
        # The lower of the newest two: one high level alone may be chance.
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
    """A detector of a training that is much slower than it was."""

    def __init__(self) -> None:
        self._levels: list[float] = []

    def see(self, tokens_per_second: Sequence[float]) -> Detection | None:
        """Judge the throughput in the lines of some seconds; None: it is no slower, or too little is known."""
        earlier = self._levels[:-1]
        is_known = len(self._levels) > _LEAST_LEVELS
        self._levels.append(median(tokens_per_second))
        if not is_known:
            return None
        # The higher of the newest two: one low level alone may be chance.
        before, now = median(earlier), max(self._levels[-2:])
        if now >= _SLOWER * before:
            return None
        return Detection(
            f"training has slowed down from {before:,.0f} to {now:,.0f} tokens/s; ranks.jsonl tells whether ranks wait"
            " for data or for a slow rank, and a machine may be too hot or have other work",
            {"tokens_per_second": now, "before": before},
        )


class _DiskAfterSave(NamedTuple):
    """How much of the disk was free after the save of a step."""

    step: int
    free_bytes: int


class DiskFilling:
    """A detector of a disk that has little room, or will be full before the end of the run.

    Args:
        num_kept: number of checkpoints that stay: before there are so many, each save fills the disk.
        max_steps: number of the run's steps; None: not known.
    """

    def __init__(self, num_kept: int, max_steps: int | None) -> None:
        self._num_kept, self._max_steps = num_kept, max_steps
        self._after_saves: list[_DiskAfterSave] = []

    def see(self, step: int, save_bytes: int, free_bytes: int) -> Detection | None:
        """Judge the disk after a save.

        Args:
            step: step of the save.
            save_bytes: size of the checkpoint.
            free_bytes: free bytes of the disk after it.
        """
        self._after_saves.append(_DiskAfterSave(step, free_bytes))
        figures = {"free_bytes": free_bytes, "save_bytes": save_bytes}
        hint = "free space, or a smaller checkpoint.keep"
        if free_bytes < 2 * save_bytes:
            sizes = f"{size(free_bytes)} are free, and a save has {size(save_bytes)}"
            return Detection(f"the disk has no room for two saves: {sizes}; {hint}", figures)
        settled = self._after_saves[self._num_kept :]
        if len(settled) <= _SAVES_SEEN or self._max_steps is None:
            return None
        first = settled[0]
        if step <= first.step:  # The run went back to an earlier step.
            return None
        bytes_a_step = (first.free_bytes - free_bytes) / (step - first.step)
        # A new checkpoint is written before an old one is removed.
        usable_bytes = free_bytes - save_bytes
        if bytes_a_step <= 0 or usable_bytes >= bytes_a_step * (self._max_steps - step):
            return None
        full_at = step + int(usable_bytes / bytes_a_step)
        sizes = f"{size(free_bytes)} are free, and 1000 steps take {size(1000 * bytes_a_step)}"
        return Detection(
            f"the disk will be full at about step {full_at:,} of {self._max_steps:,}: {sizes}; {hint}",
            figures | {"full_at_step": full_at},
        )


def see_mirror(line: Line) -> Detection | None:
    """Judge the line of metrics.jsonl about an upload to the mirror; None: the upload has not failed."""
    if not line["mirror/failed"]:
        return None
    step, newest, failures = int(line["mirror/step"]), line.get("mirror/newest_step"), int(line["mirror/failures"])
    figures, has = {"failures": failures}, "no checkpoint"
    if newest is not None:
        figures["newest_step"] = int(newest)
        has = f"step {int(newest):,} as its newest"
    # If the newest step is there, what failed is the removal of an old one.
    what = "cannot be tidied" if newest == step else f"has not got step {step:,}"
    text = f"the mirror {what}, and has {has}; {count(failures, 'upload')} failed so far, and a warning says why"
    return Detection(text, figures)


def see_mismatch(mismatch: float) -> Detection | None:
    """Judge the distance of the policy from the one that gave the answers, in nats a token; None: it is small."""
    if mismatch <= _LARGEST_MISMATCH:
        return None
    return Detection(
        f"log-probabilities of answers are {mismatch:.2g} from those of the generators that gave them, in the mean of"
        " tokens; a lower task.max_staleness or optimizer.lr, or the generators compute otherwise",
        {"mismatch": mismatch},
    )


class OldCheckpoint:
    """A detector of a newest checkpoint that is older than it should be.

    Args:
        save_every: steps between two checkpoints.
    """

    def __init__(self, save_every: int) -> None:
        self._save_every = save_every
        self._saved: int | None = None
        """Step of the newest checkpoint, or of the start's begin; None: no step was seen."""
        self._seconds = 0.0
        """Time of the steps since then."""

    def note_save(self, step: int) -> None:
        """Note that a checkpoint of a step was saved."""
        self._saved, self._seconds = step, 0.0

    def see(self, step: int, seconds: float) -> Detection | None:
        """Judge a line by its step; None: a save is not late.

        Args:
            step: the step.
            seconds: time of all steps since the line before.
        """
        saved = self._saved
        if saved is None or step < saved:
            # This start began before this step, or went back to there.
            saved = step - 1
            self.note_save(saved)
        self._seconds += seconds
        if step - saved <= _LATE_SAVES * self._save_every or self._seconds < _LATE_SECONDS:
            return None
        return Detection(
            f"nothing has been saved for {step - saved:,} steps, with checkpoint.every={self._save_every}; the"
            " disk may be slow, or steps are skipped",
            {"saved_step": saved, "save_every": self._save_every},
        )
