"""The file rollouts.jsonl: some answers of each logged step, with their rewards, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerState

from hfdist.rewards import Generation
from hfdist.trainer.step.step_lines import StepLines

_SHOWN_PROMPTS = 2
"""Number of prompts of each logged step whose answers are written to the file."""


class RolloutLines(StepLines):
    """Writes the answers to the first prompts of each logged step.

    Args:
        path: the file.
        every: number of steps between two logged ones.
        num_generations: number of answers to each prompt.
    """

    def __init__(self, path: Path, every: int, num_generations: int) -> None:
        super().__init__(path)
        self._every, self._num_shown = every, _SHOWN_PROMPTS * num_generations

    def write_some(
        self, generations: Sequence[Generation], scores: dict[str, list[float]], state: TrainerState
    ) -> None:
        """Write the answers to the first prompts of rank 0, if the step that trains on them is logged.

        Args:
            generations: the answers to the prompts of a step.
            scores: a number for each answer, by the name of the reward.
            state: state of the Trainer before the step.
        """
        step = state.global_step + 1
        if step % self._every != 0:
            return
        for place, generation in enumerate(generations[: self._num_shown]):
            line: dict[str, object] = {"step": step, "prompt": generation.prompt, "text": generation.text}
            if generation.turns:
                line["turns"] = [turn._asdict() for turn in generation.turns]
            self.write(line | {name: values[place] for name, values in scores.items()})
