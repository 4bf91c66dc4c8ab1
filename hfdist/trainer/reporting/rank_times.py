"""ranks.jsonl: for each logged step, the seconds and the memory of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import TrainerControl, TrainerState

from hfdist.collectives import control_group, rank, world_size
from hfdist.records import RANKS, RankColumn
from hfdist.trainer.reporting.callbacks import StepLines
from hfdist.trainer.reporting.peak_memory import read_peak
from hfdist.trainer.reporting.throughput import Throughput


class _Gathering(NamedTuple):
    """What travels to rank 0."""

    step: int
    by_rank: list[torch.Tensor]
    work: dist.Work | None


class RankTimes(StepLines):
    """Writes on rank 0 what all ranks have measured; all ranks have this callback.

    One gather of five numbers a logged step, in the control group. No rank waits for it: it ends before the next step
    begins, while the next batches are read.

    Args:
        run_dir: the folder of the file.
        throughput: of the Trainer; its clock has measured the steps.
        use: gets each line that was written, on rank 0.
    """

    def __init__(
        self, run_dir: Path, throughput: Throughput, use: Callable[[dict[str, Any]], None] = lambda line: None
    ) -> None:
        super().__init__(run_dir / RANKS)
        self._throughput, self._use = throughput, use
        self._gathering: _Gathering | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the file, and count memory from here on. A collective."""
        super().on_train_begin(args, state, control, **kwargs)
        self._group = control_group()
        read_peak(args.device)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Send the figures of this rank behind a training line of the Trainer, which all ranks have alike."""
        if "step_seconds" not in (kwargs.get("logs") or {}):
            return
        self._finish()
        figures = [*self._throughput.of_rank, read_peak(args.device)]
        own = torch.tensor([math.nan if value is None else value for value in figures], dtype=torch.float64)
        if self._group is None:
            self._gathering = _Gathering(state.global_step, [own], None)
            return
        by_rank = [torch.empty_like(own) for _ in range(world_size())] if rank() == 0 else []
        work = dist.gather(own, by_rank or None, dst=0, group=self._group, async_op=True)
        self._gathering = _Gathering(state.global_step, by_rank or [own], work)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the line of the step before."""
        self._finish()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the last line."""
        self._finish()

    def on_rollback(self, state: TrainerState) -> None:
        """Set the lines of later steps aside."""
        self._finish()
        super().on_rollback(state)

    def _finish(self) -> None:
        if self._gathering is None:
            return
        step, by_rank, work = self._gathering
        self._gathering = None
        if work is not None:
            work.wait()
        if rank() == 0:
            line = _line(step, torch.stack(by_rank))
            self.write(line)
            self._use(line)


def _line(step: int, by_rank: torch.Tensor) -> dict[str, Any]:
    """Make a line of [ranks, columns]."""
    columns: list[list[float]] = by_rank.T.tolist()
    named = dict(zip(RankColumn, columns, strict=True))
    return {"step": step} | {column.value: [_number(column, value) for value in of] for column, of in named.items()}


def _number(column: RankColumn, value: float) -> float | int | None:
    if math.isnan(value):
        return None
    # More digits are noise, and a line has a number for each rank.
    return int(value) if column is RankColumn.peak_bytes else round(value, 6)
