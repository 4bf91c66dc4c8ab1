"""Run the pretraining recipe on forked ranks, and read what it left behind."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from transformers import TrainerCallback

from hfdist.config.composition.compose import compose_config
from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from recipes.pretrain import main

# A model and steps small enough for a second; everything else is the shipped config on the embedded corpus.
SMALL = (
    "model=tiny",
    # As a model of a usual size would.
    "model.loss=chunked",
    "data.sequence_length=64",
    "data.eval_sequences=8",
    "data.workers=0",
    "train.max_steps=20",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=2",
    "checkpoint=none",
    "report=quiet",
)


def pretrain(folder: Path, num_processes: int, *overrides: str, timeout_seconds: float = 120) -> Path:
    """Run the recipe with `SMALL` and `overrides`, and give its run folder."""
    # Nobody gives two models.
    small = [word for word in SMALL if word != "model=tiny" or not any(one.startswith("model=") for one in overrides)]
    config = compose_config([*small, f"run.dir={folder}", *overrides])
    run_ranks(main.__wrapped__, num_processes, config, group=num_processes > 1, timeout_seconds=timeout_seconds)
    return folder


def losses(run_dir: Path) -> list[float]:
    """Training losses in order of their steps."""
    return [line["loss"] for line in read_lines(RunFolder(run_dir).metrics) if "loss" in line]


def eval_losses(run_dir: Path) -> list[float]:
    """Held-out losses in order."""
    return [line["eval_loss"] for line in read_lines(RunFolder(run_dir).metrics) if "eval_loss" in line]


def weights(run_dir: Path) -> dict:
    """Exported parameters by name."""
    return load_file(run_dir / "model" / "model.safetensors")


class StopsAt(TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **named):
        """After each."""
        control.should_training_stop = state.global_step == self.step


def name_of(words: tuple[str, ...]) -> str:
    """Give a name for the folder of a run, of what makes it another one than others."""
    return "-".join(words).replace("=", "-")
