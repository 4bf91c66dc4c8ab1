"""How a Trainer saves, besides TrainingArguments, and the state that it saves besides that of its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hfdist.checkpoint import Keep, Replicas
from hfdist.checkpoint.mirror import Uploader
from hfdist.checkpoint.piece import Piece
from hfdist.config.islands import IslandsConfig


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How a Trainer saves, besides TrainingArguments."""

    run_values: Mapping[str, object] | None = None
    """The config of the run, if it has one: kept in each checkpoint, to compare with at a resume."""
    keep: Keep | None = None
    """Which checkpoints stay; None: as many as `args.save_total_limit` says."""
    uploader: Uploader | None = None
    """Sends each checkpoint to a mirror, on rank 0; None: there is none, or this is another rank."""
    replicas: Replicas | None = None
    """Keeps a replica of each save in memory; None: there are none."""
    replicate_every: int | None = None
    """Steps between replicas; None: none but with the saves."""
    save_in_background: bool = True
    """Whether training goes on from a copy in memory while a checkpoint is written."""
    write_more: Callable[[Path], None] | None = None
    """Adds files to each folder of the model, on rank 0; None: nothing is added."""
    islands: IslandsConfig | None = None
    """Settings of an island, which trains the model with others; None: it trains alone."""

    @property
    def is_run(self) -> bool:
        """Whether a run has the Trainer, with a config and a folder of its own; else a program has it."""
        return self.run_values is not None


class OuterState(Protocol):
    """State of a training that no engine has: of the island that the Trainer is, or of the objective."""

    def before_save(self) -> None:
        """Make the pieces ready for a checkpoint."""

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """List what a checkpoint holds of this rank."""
