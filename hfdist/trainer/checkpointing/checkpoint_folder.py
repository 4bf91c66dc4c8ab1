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
    """The folder of one Trainer's checkpoints.

    A run's folder has no others; that of a program may have checkpoints of earlier trainings, too.
    """

    def __init__(self, training: Training, options: SaveOptions) -> None:
        self._training, self._options = training, options
        self._own_names: set[str] = set()
        """Names of the checkpoints that this training has saved or gone on from."""

    @property
    def path(self) -> Path:
        """Path of the folder: within the run's folder; in a program where the original has it, one for each trial."""
        trainer = self._training.trainer
        folder = Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))
        return RunFolder(folder).checkpoints if self._options.is_run else folder

    def path_of(self, step: int) -> Path:
        """Give the path of the checkpoint of a step."""
        name = step_name(step) if self._options.is_run else original_name(step)
        return self.path / name

    # ---- the training's own checkpoints ----

    def begin(self) -> None:
        """Forget the checkpoints of an earlier training."""
        self._own_names = set()

    def add_own(self, checkpoint: Path) -> None:
        """Count a checkpoint as one of this training, if it lies in the folder."""
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
            own_paths = on_rank_zero(lambda: [str(path) for path in list_checkpoints(self.path) if self.is_own(path)])
            return first_sound(reversed(own_paths))
        try:
            return find_newest(self.path)
        except CheckpointError as error:
            # The caller looks for a way back after another error, and raises that one if there is none.
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
            CheckpointError: the path is no checkpoint, or a damaged one; or the folder has none that verifies.
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
        """Write the checkpoint with the best metric so far into the Trainer's state, if it exists or is to be saved."""
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
        keep = self._options.keep
        # As in the original, a limit of 0 or less keeps all.
        if keep is None and limit is not None and limit > 0:
            keep = Keep(newest=limit)
        if keep is None:
            return None
        # Named, as they need not be the latest: an earlier training that went further may have used the folder.
        named = {self.path_of(state.global_step).name}
        if state.best_model_checkpoint is not None:
            named.add(Path(state.best_model_checkpoint).name)
        uploader = self._options.uploader
        return replace(keep, named=frozenset(named), held=frozenset() if uploader is None else uploader.held)

    def tidy(self) -> None:
        """Remove what a killed run has left in the folder; a later save would do so, but there may be none."""
        keep = self.keep()
        if self.path.is_dir():
            remove_unfinished(self.path)
            if keep is not None:
                prune(self.path, keep)
