"""Runs that leave replicas in memory and are killed, on one machine or on several, and what each machine has then."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerCallback

from hfdist.collectives import gather_json, rank
from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.records import RunFolder, read_lines
from hfdist.run.builder import Run
from hfdist.testing import RankFailed, run_ranks
from proofs.layout_changes import COMMON, Layout
from recipes.pretrain import main
from tests.distributed.runs import SMALL

SAVED, KILLED, END = 4, 6, 8
"""Steps: of the checkpoint on the disk, of the kill, and of the end."""
SETTINGS = (*SMALL, *COMMON, "model.config.num_hidden_layers=2", "train.micro_batch_size=2", f"train.max_steps={END}",
            "checkpoint=default", f"checkpoint.every={SAVED}")  # fmt: skip


class DiesAfter(TrainerCallback):
    """Kills each rank after a step, once all that was being saved is whole."""

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step = run, step

    def on_step_begin(self, args, state, control, **named):
        """Before each step."""
        # At each step: a replica that is due while another is written is left out.
        self._run.trainer.checkpointer.wait()
        if state.global_step == self._step:
            gather_json("all are here")
            os.kill(os.getpid(), signal.SIGKILL)


def memory_of(machine: int, folder: Path) -> Path:
    """The folder that stands for the memory of a machine."""
    return folder / f"memory-{machine}"


def replicas_in(memory: Path) -> list[Path]:
    """The replicas there, oldest first."""
    return sorted(path for path in memory.glob("hfdist-*/*/step-*") if path.suffix == "")


def _live(config: RunConfig, folder: Path, machines: Sequence[int], killed_after: int | None) -> None:
    memory = memory_of(machines[rank()], folder)
    memory.mkdir(exist_ok=True)
    build = Run.build_trainer

    def build_mortal(run: Run) -> None:
        build(run)
        run.trainer.add_callback(DiesAfter(run, killed_after))

    if killed_after is not None:
        Run.build_trainer = build_mortal
    main.__wrapped__(replace(config, checkpoint=replace(config.checkpoint, replicate_dir=str(memory))))


def live(
    folder: Path,
    layout: Layout,
    *overrides: str,
    machines: Sequence[int] | None = None,
    killed_after: int | None = None,
) -> Path:
    """Start the run in `folder` once; `machines` says on which each rank is: all on one, if None."""
    settings = [*SETTINGS, "checkpoint.replicate_every=1", *layout.overrides, f"run.dir={folder}/run", *overrides]
    config = compose_config([*settings, f"checkpoint.replicate_dir={folder}"])
    on = machines or [0] * layout.num_ranks
    arguments = (_live, layout.num_ranks, config, folder, on, killed_after)
    if killed_after is None:
        run_ranks(*arguments, group=layout.num_ranks > 1)
    else:
        with pytest.raises(RankFailed, match="died without a word"):
            run_ranks(*arguments, group=layout.num_ranks > 1)
    return folder / "run"


def resumes(run_dir: Path) -> list[tuple[int, bool]]:
    """For each start that has gone on, from which step, and whether from memory."""
    events = [line for line in read_lines(RunFolder(run_dir).events) if line["event"] == "resume"]
    return [(event["step"], event.get("in_memory", False)) for event in events]


def copy_of(folder: Path, target: Path) -> Path:
    """The same run and memories elsewhere, as another story of it begins."""
    shutil.copytree(folder, target, symlinks=True)
    names = target / "run/checkpoints/replicas.json"
    if names.is_file():
        # A copy is another run otherwise.
        text = names.read_text().replace(
            str((folder / "run/checkpoints").stat().st_ino), str(names.parent.stat().st_ino)
        )
        names.write_text(text)
    return target


def wipe(folder: Path, machine: int) -> None:
    """A machine loses what it had in memory."""
    shutil.rmtree(memory_of(machine, folder))


def flip_bit(replica: Path, name: str = "model.safetensors", place: int = -1) -> None:
    """In a file of a replica, near its end."""
    content = bytearray((replica / name).read_bytes())
    content[place] ^= 1
    (replica / name).write_bytes(bytes(content))
