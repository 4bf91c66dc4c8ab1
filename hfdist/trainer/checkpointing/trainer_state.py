"""The file of the Trainer's own state in a checkpoint, and the settings that it brings to a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainerState, TrainingArguments

TRAINER_STATE = "trainer_state.json"
"""Name of the file, as transformers has it."""


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Read the Trainer's state as a checkpoint holds it."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))


@contextmanager
def with_intervals_of(checkpoint: Path, args: TrainingArguments) -> Iterator[None]:
    """Give `args` the micro batch and the intervals of a checkpoint within the block.

    So transformers does not warn that they differ.
    """
    saved = read_trainer_state(checkpoint)
    values = {name: getattr(saved, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    values["per_device_train_batch_size"] = saved.train_batch_size
    before = {name: getattr(args, name) for name in values}
    try:
        _set(args, values)
        yield
    finally:
        _set(args, before)


def _set(args: TrainingArguments, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(args, name, value)
