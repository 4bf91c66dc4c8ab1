"""Callbacks that read the lines of figures that a Trainer logs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from transformers import TrainerCallback, TrainerControl, TrainerState


class LineReader(TrainerCallback, ABC):
    """Reads each line that the Trainer logs: of training, of an evaluation, of a save or of an upload."""

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Take the line out of what the Trainer tells its callbacks."""
        self.read_line(logs or {}, state)

    @abstractmethod
    def read_line(self, line: Mapping[str, float], state: TrainerState) -> None:
        """Read a line: figures by name."""
