"""The monitor of a run: it gives each line that the run writes to detectors, and makes alerts of new detections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from hfdist.records.lines import Line
from hfdist.tools.alerts.alert import Alert, AlertKind, Detection
from hfdist.tools.alerts.detectors import (
    DiskFilling,
    FallingThroughput,
    GradNormDrift,
    LossSpike,
    OldCheckpoint,
    Plateau,
    see_mirror,
    see_mismatch,
)
from hfdist.tools.alerts.rank_window import RankWindow

WINDOW_SECONDS, WINDOW_LINES = 10.0, 8
"""Least seconds and lines over which speeds and times of ranks are judged: shorter disturbances come from outside."""
_FIRST_LINES = 2
"""Number of first lines of a start whose times are not judged: they hold what is done only once."""
_REPEAT_STEPS = 1000
"""Steps after which an alert that has not ended is given again."""
_END_LOOKS = 8
"""An alert ends after this many looks that find nothing: then the same kind is new again."""

_Found = dict[AlertKind, Detection | None]
"""The results of the detectors that have judged a line, by kind; None: a detector has found nothing."""


class Monitor:
    """The detectors of one start of a run, which see each line when it is written.

        a line --> detectors --> detections of this line --> alerts: those that are new, or have lasted for long

    Args:
        max_steps: last step of the run; None: not known.
        save_every: steps between two checkpoints; None: no checkpoint is saved.
        num_kept: number of checkpoints that stay on the disk.
        num_stages: number of pipeline stages.
        hosts: name of each rank's host; empty: not known.
    """

    def __init__(
        self,
        *,
        max_steps: int | None = None,
        save_every: int | None = None,
        num_kept: int = 2,
        num_stages: int = 1,
        hosts: Sequence[str] = (),
    ) -> None:
        self._loss_spike, self._plateau, self._drift = LossSpike(), Plateau(), GradNormDrift()
        self._throughput, self._disk = FallingThroughput(), DiskFilling(num_kept, max_steps)
        self._old_checkpoint = None if save_every is None else OldCheckpoint(save_every)
        self._num_stages, self._hosts = num_stages, hosts
        # Tokens a second in the lines since throughput was last judged, and the time of their steps.
        self._rates: list[float] = []
        self._rate_seconds = 0.0
        self._ranks = RankWindow(num_stages, hosts)
        # Step of the last line, and number of lines so far, of each file.
        self._steps = {"metrics": 0, "ranks": 0}
        self._num_lines = {"metrics": 0, "ranks": 0}
        self._alerted: dict[AlertKind, dict[object, int]] = {kind: {} for kind in AlertKind}
        """Step of the last alert of each kind, by what its detection is about: a rank, or None."""
        self._num_looks_without = dict.fromkeys(AlertKind, 0)
        """Number of looks in a row that have found nothing, by kind."""

    def see_metrics(self, line: Line, free_bytes: int | None = None) -> list[Alert]:
        """Judge a line of metrics.jsonl, and give the alerts that follow.

        Args:
            line: the line, with its step.
            free_bytes: free bytes of the disk, if the line is about a save; None: not known.
        """
        step, found = int(line["step"]), _Found()
        if "checkpoint/step" in line:
            if self._old_checkpoint is not None:
                self._old_checkpoint.note_save(step)
            if free_bytes is not None:
                found[AlertKind.disk_filling] = self._disk.see(step, int(line["checkpoint/bytes"]), free_bytes)
        if "mirror/step" in line:
            found[AlertKind.mirror] = see_mirror(line)
        if _is_finite(mismatch := line.get("mismatch")):
            found[AlertKind.mismatch] = see_mismatch(mismatch)
        is_rewarded = "reward" in line
        if not is_rewarded:
            # The loss of rewarded answers is near 0, and their gradients are as large as rewards differ.
            self._see_losses(line, found)
        if "step_seconds" in line:
            seconds = line["step_seconds"] * self._count_steps("metrics", step)
            if self._old_checkpoint is not None:
                found[AlertKind.old_checkpoint] = self._old_checkpoint.see(step, seconds)
            # How fast answers are written depends on the longest of them.
            if self._num_lines["metrics"] > _FIRST_LINES and not is_rewarded:
                self._see_rate(line["tokens_per_second"], seconds, found)
        return self._make_alerts(step, found)

    def _see_losses(self, line: Line, found: _Found) -> None:
        if _is_finite(loss := line.get("loss")):
            found[AlertKind.loss_spike] = self._loss_spike.see(loss)
            found[AlertKind.plateau] = self._plateau.see(loss)
        if _is_finite(norm := line.get("grad_norm")):
            found[AlertKind.grad_norm_drift] = self._drift.see(norm)

    def see_ranks(self, line: Line) -> list[Alert]:
        """Judge a line of ranks.jsonl, and give the alerts that follow."""
        step, found = int(line["step"]), _Found()
        num_steps = self._count_steps("ranks", step)
        if self._num_lines["ranks"] > _FIRST_LINES:
            self._ranks.add(line, num_steps)
        if self._ranks.seconds >= WINDOW_SECONDS and self._ranks.num_lines >= WINDOW_LINES:
            found[AlertKind.slow_rank] = self._ranks.find_slow_rank()
            found[AlertKind.data_wait] = self._ranks.find_data_wait()
            self._ranks = RankWindow(self._num_stages, self._hosts)
        return self._make_alerts(step, found)

    def _see_rate(self, tokens_per_second: float, seconds: float, found: _Found) -> None:
        self._rates.append(tokens_per_second)
        self._rate_seconds += seconds
        if self._rate_seconds >= WINDOW_SECONDS and len(self._rates) >= WINDOW_LINES:
            found[AlertKind.falling_throughput] = self._throughput.see(self._rates)
            self._rates, self._rate_seconds = [], 0.0

    def _count_steps(self, file: str, step: int) -> int:
        """Count a line of a file, and give the number of steps that it is about: all since the line before.

        The first line is about one step, as it is not known where the start began.
        """
        is_first = self._num_lines[file] == 0
        num_steps = 1 if is_first else max(step - self._steps[file], 1)
        self._steps[file] = step
        self._num_lines[file] += 1
        return num_steps

    def _make_alerts(self, step: int, found: _Found) -> list[Alert]:
        """Make an alert of each detection that is new, or whose last alert was many steps ago."""
        alerts = []
        for kind, detection in found.items():
            alerted = self._alerted[kind]
            if detection is None:
                self._num_looks_without[kind] += 1
                if self._num_looks_without[kind] >= _END_LOOKS:
                    alerted.clear()
                continue
            self._num_looks_without[kind] = 0
            about = detection.figures.get("rank")
            # A run that went back to an earlier step gives its alerts again, too.
            is_recent = about in alerted and 0 <= step - alerted[about] < _REPEAT_STEPS
            if not is_recent:
                alerted[about] = step
                alerts.append(Alert(text=detection.text, figures=detection.figures, step=step, kind=kind))
        return alerts


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
