"""The callback that writes ranks.jsonl: the seconds and the memory of each rank, for each logged step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.collectives import rank, world_size
from hfdist.control_group import control_group
from hfdist.records.lines import Line
from hfdist.run.callbacks.line_reader import LineReader
from hfdist.run.peak_memory import PeakMemory
from hfdist.run.rank_summary import RankSummary, to_columns
from hfdist.trainer.step.step_lines import StepLines
from hfdist.trainer.step.throughput import Throughput

_GATHER_SECONDS = 0.5
"""Seconds between two gathers of short steps: a gather costs a tenth of a millisecond, and a step may take a few."""
_MOST_LINES = 64
"""The most lines that are gathered together: a killed run loses as many."""


class _Gathering(NamedTuple):
    """Figures that are on their way to all ranks."""

    steps: list[int]
    """Steps of the lines."""
    wait: Callable[[], list[torch.Tensor]]
    """Waits for the figures, and gives those of each rank; float64 of shape [steps, columns]."""


class RankTimes(LineReader, StepLines):
    """Writes on rank 0 what all ranks have measured; all ranks have this callback.

    Lines of long steps are gathered one by one, and those of short steps together. No rank waits for that: it ends
    with the step that follows.

    Args:
        path: path of the file.
        throughput: measures the steps of the Trainer.
        use: is given each line with the figures of all ranks, on rank 0, and says whether the file must have all of
            them in this line, too.
    """

    def __init__(self, path: Path, throughput: Throughput, use: Callable[[Line], bool] = lambda line: False) -> None:
        super().__init__(path)
        self._throughput, self._use = throughput, use
        self._steps: list[int] = []
        self._figures: list[list[float]] = []
        """Figures of this rank for each of `_steps`; they have not been sent yet."""
        self._last_step, self._lines_together = 0, 1
        self._gathering: _Gathering | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Open the file, and count memory from here on. A collective."""
        super().on_rollback(state)
        self._last_step, self._lines_together = state.global_step, 1
        self._group, self._memory = control_group(), PeakMemory(args.device)
        self._summary = RankSummary(world_size())

    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Note the figures of this rank after a training line of the Trainer, which all ranks have alike."""
        if "step_seconds" in line:
            self._steps.append(state.global_step)
            figures = [*self._throughput.of_rank, self._memory.read()]
            self._figures.append([math.nan if value is None else value for value in figures])
            if len(self._steps) >= self._lines_together:
                self._gather()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the lines that have arrived."""
        self._finish()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the last lines. A collective."""
        self._finish()
        self._gather()
        self._finish()
        line = self._summary.take() if rank() == 0 else {}
        if line:
            self.write({"step": self._last_step, **line})

    def on_rollback(self, state: TrainerState) -> None:
        """Set the lines of later steps aside. A collective, where lines are under way."""
        self._finish()
        self._gather()
        self._finish()
        self._last_step, self._summary = state.global_step, RankSummary(world_size())
        super().on_rollback(state)

    def _gather(self) -> None:
        """Begin to gather the figures that were not sent yet. A collective."""
        if not self._steps:
            return
        figures_here = torch.tensor(self._figures, dtype=torch.float64)
        wait = (lambda: [figures_here]) if self._group is None else self._group.begin_gather(figures_here)
        self._gathering = _Gathering(self._steps, wait)
        self._steps, self._figures = [], []

    def _finish(self) -> None:
        """Wait for the figures that are on their way, write their lines, and choose how many are gathered next."""
        if self._gathering is None:
            return
        steps, wait = self._gathering
        self._gathering = None
        gathered = torch.stack(wait())
        # All ranks have the same figures, and decide the same: torch's mean would depend on the processor.
        mean = fmean(gathered[:, :, 0].flatten().tolist())
        line_seconds = mean * max(steps[-1] - self._last_step, 1) / len(steps)
        self._lines_together = min(max(int(_GATHER_SECONDS / line_seconds), 1), _MOST_LINES)
        for step, figures in zip(steps, gathered.permute(1, 2, 0).numpy(), strict=True):
            num_steps, self._last_step = max(step - self._last_step, 1), step
            if rank() == 0:
                is_told = self._use({"step": step, **to_columns(figures)})
                self.write(self._summary.line(step, num_steps, figures, with_ranks=is_told))
