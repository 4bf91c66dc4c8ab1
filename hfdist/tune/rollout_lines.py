"""Some answers of each logged step, with their rewards, in rollouts.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerState

from hfdist.rewards import Generation
from hfdist.trainer.step.step_lines import StepLines

_SHOWN_PROMPTS = 2
"""Number of prompts of each logged step whose answers are written to the file."""


class RolloutLines(StepLines):
    """Writes some answers of each logged step, with their rewards, into rollouts.jsonl."""

    def __init__(self, path: Path, every: int, num_generations: int) -> None:
        super().__init__(path)
        self._every, self._count = every, _SHOWN_PROMPTS * num_generations

    def write_some(
        self, generations: Sequence[Generation], scores: dict[str, list[float]], state: TrainerState
    ) -> None:
        """Write the answers to the first prompts of rank 0, with the step that trains on them."""
        step = state.global_step + 1
        if step % self._every == 0:
            for place, one in enumerate(generations[: self._count]):
                rewards = {name: values[place] for name, values in scores.items()}
                turns = {"turns": [turn._asdict() for turn in one.turns]} if one.turns else {}
                self.write({"step": step, "prompt": one.prompt, "text": one.text, **turns, **rewards})
