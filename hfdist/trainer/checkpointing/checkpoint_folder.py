"""The folder of a Trainer's checkpoints: their names, which of them are its own, and which of them stay."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from hfdist.checkpoint import Keep, find_newest, prune, verify_together
from hfdist.checkpoint.folder import by_held_out_loss, list_checkpoints, original_name, remove_unfinished, step_name
from hfdist.collectives import on_all_ranks, on_rank_zero, rank
from hfdist.errors import CheckpointError
from hfdist.records import RunFolder
from hfdist.trainer.checkpointing.find import check_is_checkpoint, first_sound, newest_of
from hfdist.trainer.checkpointing.save_options import SaveOptions
from hfdist.trainer.training import Training

logger = logging.getLogger(__name__)


class CheckpointFolder:
    """The checkpoints of one Trainer. A run's folder has no others, and one from Python those of earlier trainings."""

    def __init__(self, training: Training, options: SaveOptions) -> None:
        self._training, self._options = training, options
        self._own_names: set[str] = set()
        """Names of the checkpoints that this training has saved or gone on from."""

    @property
    def path(self) -> Path:
        """The folder: within that of a run; from Python, where the original has it, a trial's too."""
        trainer = self._training.trainer
        folder = Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))
        return RunFolder(folder).checkpoints if self._options.is_run else folder

    def path_of(self, step: int) -> Path:
        """Give the path of the checkpoint of a step."""
        return self.path / (step_name if self._options.is_run else original_name)(step)

    # ---- the training's own checkpoints ----

    def begin(self) -> None:
        """Forget the checkpoints of an earlier training."""
        self._own_names = set()

    def add_own(self, checkpoint: Path) -> None:
        """Take a checkpoint for one of this training, if it lies in the folder."""
        if checkpoint.resolve().parent == self.path.resolve():
            self._own_names.add(checkpoint.resolve().name)

    @property
    def has_own(self) -> bool:
        """Whether this training has saved a checkpoint, or has begun with one of the folder."""
        return bool(self._own_names)

    def is_own(self, checkpoint: Path) -> bool:
        """Whether a checkpoint of the folder is of this training; one of an earlier start of the run is, too."""
        return self._options.is_run or checkpoint.name in self._own_names

    def find_own(self) -> Path | None:
        """Give the newest checkpoint of this training that verifies; None: none does. A collective."""
        if not self._options.is_run:
            own = on_rank_zero(lambda: [str(path) for path in list_checkpoints(self.path) if self.is_own(path)])
            return first_sound(reversed(own))
        try:
            return find_newest(self.path)
        except CheckpointError as error:
            # A way back is asked for after an error, which the run raises if there is none.
            if rank() == 0:
                logger.warning("%s", error)
            return None

    def find_best(self) -> tuple[Path, float] | None:
        """Give the run's checkpoint with the lowest held-out loss that verifies, and the loss. A collective."""
        losses = dict(on_rank_zero(lambda: [(str(path), loss) for path, loss in by_held_out_loss(self.path)]))
        found = first_sound(losses)
        return None if found is None else (found, float(losses[str(found)]))

    def find_start(self, asked: str | bool) -> str:
        """Give the checkpoint of this path, or for True the newest of the folder that verifies. A collective.

        Raises:
            CheckpointError: it is none, or it is damaged; or the folder has none that verifies.
        """
        if asked is True:
            return str(newest_of(self.path))
        path = Path(str(asked))
        on_all_ranks(lambda: check_is_checkpoint(path), is_told=False)
        if not self._options.is_run:
            # A run has verified its own checkpoint before.
            verify_together(path)
        return str(path)

    # ---- which ones stay ----

    def note_best(self) -> None:
        """Name the checkpoint with the best metric so far in the Trainer's state, if there is one or will be."""
        state = self._training.state
        if not state.best_global_step:
            return
        path = self.path_of(state.best_global_step)
        is_known = state.best_global_step == state.global_step or state.best_model_checkpoint == str(path)
        if is_known or on_rank_zero(path.is_dir):
            state.best_model_checkpoint = str(path)

    def keep(self) -> Keep | None:
        """Say which checkpoints stay after a save of this step; None: all."""
        limit, state = self._training.args.save_total_limit, self._training.state
        # As in the original, 0 and less mean all.
        keep: Keep | None = self._options.keep or (Keep(newest=limit) if limit and limit > 0 else None)
        if keep is None:
            return None
        # Not only the latest steps: an earlier training that went further may have used the folder.
        named = {self.path_of(state.global_step).name}
        if state.best_model_checkpoint is not None:
            named.add(Path(state.best_model_checkpoint).name)
        uploader = self._options.uploader
        return replace(keep, named=frozenset(named), held=frozenset() if uploader is None else uploader.held)

    def tidy(self) -> None:
        """Remove what a run that was killed after its last save has left: no later save may come to do it."""
        keep = self.keep()
        if self.path.is_dir():
            remove_unfinished(self.path)
            if keep is not None:
                prune(self.path, keep)
