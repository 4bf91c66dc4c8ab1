"""A file with a line of JSON for each step, which goes back with the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO, runtime_checkable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.records.lines import add_line, reporting_full_disk, set_aside


@runtime_checkable
class OnRollback(Protocol):
    """A callback that must know when the run goes back to a checkpoint."""

    def on_rollback(self, state: TrainerState) -> None:
        """Forget the steps after `state.global_step`: they will be done again."""


class StepLines(TrainerCallback):
    """A file with one JSON object a line, each of a step: floats at full precision, null if they are not finite.

    Lines of steps that the run will do again move to `earlier(path)`. A full disk is a ResourceError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Open the file on rank 0; go on after the lines up to the present step. At step 0 no line is kept."""
        self.on_rollback(state)

    def on_rollback(self, state: TrainerState) -> None:
        """Set the lines of later steps aside."""
        if not state.is_world_process_zero:
            return
        if self._file is not None:
            self._file.close()
        set_aside(self._path, state.global_step if state.global_step > 0 else -1)
        with reporting_full_disk(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, object]) -> None:
        """Add a line, where the file is open."""
        if self._file is None:
            return
        with reporting_full_disk(self._path):
            add_line(self._file, line)
