"""The monitor of a run: it gives each line to all detectors, and makes an alert of each detection that is new."""

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
"""Least seconds and lines over which figures that depend on the machine are judged: shorter disturbances are none of
the run's."""
_FIRST_LINES = 2
"""First lines of a start, whose times are not judged: they hold what is done only once."""
_REPEAT_STEPS = 1000
"""Steps after which an alert that has not ended is given again."""
_END_LOOKS = 8
"""An alert ends after this many looks that find nothing: then the same kind is new again."""

_Found = dict[AlertKind, Detection | None]
"""What was looked for in a line; None: it is not so."""


class Monitor:
    """Finds what is wrong in the lines of one start of a run, each seen when it is written.

    Args:
        max_steps: last step of the run; None: not known.
        save_every: steps between two checkpoints; None: none is saved.
        num_kept: number of checkpoints that stay.
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
        self._rates: list[float] = []
        self._rate_seconds = 0.0
        self._ranks = RankWindow(num_stages, hosts)
        self._steps = {"metrics": 0, "ranks": 0}
        self._num_lines = {"metrics": 0, "ranks": 0}
        self._alerted: dict[AlertKind, dict[object, int]] = {kind: {} for kind in AlertKind}
        """Step of the last alert of each kind, by what its detection is about: a rank, or None."""
        self._num_looks_without = dict.fromkeys(AlertKind, 0)

    def see_metrics(self, line: Line, free_bytes: int | None = None) -> list[Alert]:
        """Judge a line of metrics.jsonl; `free_bytes`: free bytes of the disk, where the line is of a save."""
        step, found = int(line["step"]), _Found()
        if "checkpoint/step" in line:
            if self._old_checkpoint is not None:
                self._old_checkpoint.saved(step)
            if free_bytes is not None:
                found[AlertKind.disk_filling] = self._disk.see(step, int(line["checkpoint/bytes"]), free_bytes)
        if "mirror/step" in line:
            found[AlertKind.mirror] = see_mirror(line)
        if _is_finite(mismatch := line.get("mismatch")):
            found[AlertKind.mismatch] = see_mismatch(mismatch)
        # The loss of rewarded answers is near 0, and gradients are as large as rewards differ.
        if not (is_rewarded := "reward" in line):
            if _is_finite(loss := line.get("loss")):
                found[AlertKind.loss_spike] = self._loss_spike.see(loss)
                found[AlertKind.plateau] = self._plateau.see(loss)
            if _is_finite(norm := line.get("grad_norm")):
                found[AlertKind.grad_norm_drift] = self._drift.see(norm)
        if "step_seconds" in line:
            seconds = line["step_seconds"] * self._count_steps("metrics", step)
            if self._old_checkpoint is not None:
                found[AlertKind.old_checkpoint] = self._old_checkpoint.see(step, seconds)
            # How fast answers are written depends on the longest of them.
            if self._num_lines["metrics"] > _FIRST_LINES and not is_rewarded:
                self._see_rate(line["tokens_per_second"], seconds, found)
        return self._alert(step, found)

    def see_ranks(self, line: Line) -> list[Alert]:
        """Judge a line of ranks.jsonl."""
        step, found = int(line["step"]), _Found()
        num_steps = self._count_steps("ranks", step)
        if self._num_lines["ranks"] > _FIRST_LINES:
            self._ranks.add(line, num_steps)
        if self._ranks.seconds >= WINDOW_SECONDS and self._ranks.num_lines >= WINDOW_LINES:
            found[AlertKind.slow_rank] = self._ranks.find_slow_rank()
            found[AlertKind.data_wait] = self._ranks.find_data_wait()
            self._ranks = RankWindow(self._num_stages, self._hosts)
        return self._alert(step, found)

    def _see_rate(self, tokens_per_second: float, seconds: float, found: _Found) -> None:
        self._rates.append(tokens_per_second)
        self._rate_seconds += seconds
        if self._rate_seconds >= WINDOW_SECONDS and len(self._rates) >= WINDOW_LINES:
            found[AlertKind.falling_throughput] = self._throughput.see(self._rates)
            self._rates, self._rate_seconds = [], 0.0

    def _count_steps(self, file: str, step: int) -> int:
        """Count the steps of this line of the file: all since the line before; 1 for the first line."""
        num_steps = max(step - self._steps[file], 1) if self._num_lines[file] else 1
        self._steps[file], self._num_lines[file] = step, self._num_lines[file] + 1
        return num_steps

    def _alert(self, step: int, found: _Found) -> list[Alert]:
        """Make an alert of each detection that is new."""
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
            if about not in alerted or not 0 <= step - alerted[about] < _REPEAT_STEPS:
                alerted[about] = step
                alerts.append(Alert(text=detection.text, figures=detection.figures, step=step, kind=kind))
        return alerts


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
