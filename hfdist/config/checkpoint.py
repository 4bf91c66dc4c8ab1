"""`checkpoint.*`: when to save, what to keep, where to start."""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.config.ranges import limited


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints are `<run.dir>/checkpoints/step-00000100`."""

    every: int | None = limited(None, at_least=1)
    """Steps between saves; null: none."""
    keep: int = limited(2, at_least=1)
    """How many of the newest are kept."""
    keep_every: int | None = limited(None, at_least=1)
    """Also kept: those of steps that this divides; null: none."""
    keep_best: bool = False
    """Also kept: the one with the lowest held-out loss."""
    background: bool = True
    """Write from a copy in the host's memory while training goes on; false: no copy, and training waits."""
    resume: str = "auto"
    """`auto`: the newest that verifies, from step 0 if there are none; `never`: refuse a folder that has checkpoints;
    or the path of one to begin from: of another run, it counts until this run has checkpoints of its own."""
    allow_changes: bool = False
    """Go on from a checkpoint though keys, or data files, have changed that change the training."""
