"""Saves a training, and lets it go on from what was saved: tensors by name, and all else that a step depends on."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from hfdist.checkpoint import (
    Saver,
    export_model,
    read_checkpoint,
    restore_random_state,
    verify_together,
    write_lanes,
)
from hfdist.checkpoint.folder import HELD_OUT_LOSS
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.save_plan import ADAPTER_STEM, MODEL_STEM
from hfdist.checkpoint.whole import check_holds_whole
from hfdist.collectives import gather_json, on_rank_zero, rank
from hfdist.data import Cursor
from hfdist.errors import CheckpointError, HfdistError
from hfdist.models.names.hub_names import HubNames, find_hub_names
from hfdist.models.packed_weights import packed_shapes
from hfdist.records import RunFolder
from hfdist.trainer.checkpointing.adapter_files import adapter_pieces, has_adapter
from hfdist.trainer.checkpointing.checkpoint_folder import CheckpointFolder
from hfdist.trainer.checkpointing.data_progress import DataProgress
from hfdist.trainer.checkpointing.files_beside import FilesBeside
from hfdist.trainer.checkpointing.log_history import held_out_loss_of, newest_entries
from hfdist.trainer.checkpointing.save_log import SaveLog
from hfdist.trainer.checkpointing.save_options import OuterState, SaveOptions
from hfdist.trainer.checkpointing.schedule_state import restore_schedule, schedule_state
from hfdist.trainer.checkpointing.trainer_state import TRAINER_STATE
from hfdist.trainer.hooks import overrides
from hfdist.trainer.training import Training

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores one Trainer. All ranks call its methods together, unless a docstring says otherwise.

    It is a `RankFlag`, too: once a save has failed, all ranks raise its error after the same step.
    """

    def __init__(self, training: Training, options: SaveOptions) -> None:
        self._training, self._options = training, options
        self.folder = CheckpointFolder(training, options)
        self.data = DataProgress(training, options.islands)
        self.log = SaveLog(training, options.uploader)
        self.files = FilesBeside(training, options)
        self.outer: OuterState | None = None
        """Keeps what belongs to the training and the engine has not, as an island's state; None: there is none."""
        self.saver: Saver | None = None
        """Saves the checkpoints of a training; None before the first training."""
        self._is_prepared = False
        self._kept_step = -1
        """Step of the last save or replica; -1: there is none."""

    def begin(self) -> None:
        """Make the saver of a training that begins."""
        self.saver = Saver(
            in_background=self._options.save_in_background,
            stem=self._stem,
            names=self._names,
            write_first=self.data.write_counted,
            replicas=self._options.replicas,
        )
        self.folder.begin()
        self.files.begin()
        self._is_prepared, self._kept_step = False, -1
        self._check_holds_whole()

    @property
    def _begun_saver(self) -> Saver:
        """The saver, once a training has begun."""
        assert self.saver is not None
        return self.saver

    # ---- what is saved ----

    @property
    def _stem(self) -> str:
        """Name of the files of weights, without their ending."""
        return ADAPTER_STEM if has_adapter(self._training.model) else MODEL_STEM

    @property
    def _names(self) -> HubNames | None:
        """The names of tensors in the model's files; None: an adapter, whose tensors have PEFT's names already."""
        model = self._training.engine.model
        return None if has_adapter(model) else find_hub_names(model)

    def _check_holds_whole(self) -> None:
        """Raise a CheckpointError where ranks have lost a part of the model: before a training, and at each save."""
        training = self._training
        packed = packed_shapes(training.model)
        names = {name for name, parameter in training.model.named_parameters() if parameter in packed}
        check_holds_whole(training.engine.weights(), training.strategy.whole, names)

    def pieces(self) -> Iterator[Piece]:
        """List the pieces of tensors that this rank saves: of all the model or its adapter alone, and of `outer`."""
        pieces = self._training.engine.pieces()
        if self.outer is not None:
            pieces = self.outer.pieces(pieces)
        return adapter_pieces(self._training.model, pieces)

    def progress_state(self) -> dict[str, object]:
        """Give what the step depends on besides tensors and data, as JSON; see `load_progress`."""
        scaler = self._training.accelerator.scaler
        return {
            **schedule_state(self._training.schedule),
            "engine": self._training.engine.extra_state(),
            "loss_scaler": None if scaler is None else scaler.state_dict(),
        }

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Take back what `progress_state` gave."""
        scaler = self._training.accelerator.scaler
        self._training.engine.load_extra_state(state["engine"])
        restore_schedule(self._training.schedule, state)
        if scaler is not None and state["loss_scaler"] is not None:
            scaler.load_state_dict(state["loss_scaler"])

    def _state_of_run(self, cursor: Mapping[str, object] | None) -> dict[str, object]:
        """Give what the manifest says of the run: its place in the data, its config and its held-out loss."""
        held_out_loss = held_out_loss_of(self._training.state)
        return {
            "cursor": cursor,
            "config": self._options.run_values,
            # JSON has no NaN, and such a loss is not the best.
            HELD_OUT_LOSS: held_out_loss if held_out_loss is not None and math.isfinite(held_out_loss) else None,
        }

    def _trainer_state(self) -> TrainerState:
        """Give a copy of the Trainer's own state, which does not change while a thread writes it."""
        self._training.trainer.store_flos()
        state = copy.copy(self._training.state)
        state.log_history = list(state.log_history)
        state.stateful_callbacks = cast(Any, self._states_of_callbacks())
        return state

    def _states_of_callbacks(self) -> dict[str, object]:
        """States of the callbacks by class, as the original Trainer has them; several of one class are a list."""
        by_class: defaultdict[str, list[object]] = defaultdict(list)
        for callback in [*self._training.callbacks, self._training.control]:
            if isinstance(callback, ExportableState):
                by_class[type(callback).__name__].append(copy.deepcopy(callback.state()))
        return {name: states if len(states) > 1 else states[0] for name, states in by_class.items()}

    # ---- saving ----

    def save(self) -> Path:
        """Begin to write the checkpoint of this step, and remove those that nothing keeps; `wait` waits for it.

        Gives the folder that it will have.
        """
        begin = time.monotonic()
        # What the last save has left is then held for the mirror, and this one does not remove it.
        self.wait()
        cursor = self.data.merged_cursor()
        if cursor is not None:
            # Before the checkpoint: a run that goes on from it does not log this again.
            self._log_data(cursor)
        self.folder.note_best()
        path = self.folder.path_of(self._training.state.global_step)
        self._save(path, cursor, begin, self.files.read(path.name))
        self.folder.add_own(path)
        return path

    def _log_data(self, cursor: Cursor) -> None:
        """Log how much was read of each pool of documents."""
        figures: dict[str, float] = {}
        for report in self.data.reports_at(cursor):
            values = report._asdict()
            pool = values.pop("name")
            figures |= {f"data/{pool}/{name}": value for name, value in values.items()}
        self.log.write(figures)

    def prepare(self) -> None:
        """Let the saver make its plan and its memory, once there is all that a checkpoint holds, before one is due."""
        if self._is_prepared:
            return
        self._is_prepared = True
        args, state = self._training.args, self._training.state
        intervals = []
        if args.save_strategy == SaveStrategy.STEPS:
            intervals.append(state.save_steps)
        if self._options.replicate_every is not None:
            intervals.append(self._options.replicate_every)
        # A save at the end hinders no step, and islands make their pieces at a save.
        hinders = any(state.global_step + every < state.max_steps for every in intervals)
        if hinders and self.saver is not None and self.outer is None:
            self.saver.prepare(self.pieces())

    def replicates_at(self, step: int) -> bool:
        """Whether a replica is due after this step, beside those that saves leave. Any one rank may call it."""
        every = self._options.replicate_every
        return every is not None and step % every == 0

    def replicate(self) -> None:
        """Begin to write a replica in memory, if the last save or replica is written, and not of this step."""
        begin, saver = time.monotonic(), self._begun_saver
        is_kept = self._training.state.global_step == self._kept_step
        # A thread of another rank may be done a moment later; what it has set counts once none is busy.
        is_busy = any(gather_json(saver.is_busy))
        if not is_kept and not is_busy and saver.replicas is not None:
            self._save(None, self.data.merged_cursor(), begin, {})

    def _save(self, path: Path | None, cursor: Cursor | None, begin_seconds: float, files: dict[str, bytes]) -> None:
        """Begin to write a checkpoint, with `files` by their paths in it; `path` None: a replica alone."""
        self._check_holds_whole()
        self.data.count()
        if self.outer is not None:
            self.outer.before_save()
        cursor_values, lanes = None, None
        if cursor is not None and rank() == 0:
            # Rank 0 alone writes them. They are copied now, because the training goes on while a thread writes.
            cursor_values, lanes = cursor.to_columns()
        progress = self._trainer_state()

        def write_files(folder: Path, is_replica: bool) -> None:
            if not is_replica:
                for name, content in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
            progress.log_history = newest_entries(progress.log_history)
            progress.save_to_json(str(folder / TRAINER_STATE))
            if lanes is not None:
                write_lanes(folder, lanes)

        step = self._training.state.global_step
        self._begun_saver.save(
            path,
            step=step,
            pieces=self.pieces(),
            state=self.progress_state() | self._state_of_run(cursor_values),
            write_files=write_files,
            keep=self.folder.keep(),
            begin_seconds=begin_seconds,
        )
        self._kept_step = step

    def export(self, folder: Path) -> None:
        """Write a Hub folder with the weights as they are, or a PEFT folder of an adapter."""
        self._check_holds_whole()
        export_model(folder, self.pieces(), self.files.write, stem=self._stem, names=self._names)

    # ---- waiting for a save ----

    def wait(self) -> None:
        """Wait until nothing is being saved, and log it. A failed save raises its error, on all ranks alike."""
        if self.saver is not None:
            self.saver.wait()
            self._log_saves()

    @contextmanager
    def waiting_at_errors(self) -> Iterator[None]:
        """Let a running save end before an error of hfdist leaves the block: it is worth its time."""
        try:
            yield
        except HfdistError:
            with suppress(HfdistError):
                self.wait()
            raise

    def is_awaited(self) -> bool:
        """Whether the user's own callback or class is told of each save, and so may open the folder at once."""
        kinds = [type(callback) for callback in self._training.callbacks]
        return overrides(type(self._training.trainer), "_save_checkpoint") or any(
            kind.on_save is not TrainerCallback.on_save
            and kind.__module__.split(".")[0] not in ("hfdist", "transformers")
            for kind in kinds
        )

    def flag(self) -> int:
        """Give 1 if this rank knows of a save that has failed, else 0. Any one rank may call it."""
        self._log_saves()
        return int(self.saver is not None and self.saver.has_failed)

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Raise the error of the save."""
        self.wait()

    def _log_saves(self) -> None:
        self.log.add_saves([] if self.saver is None else self.saver.take_reports())

    # ---- going on from a checkpoint ----

    def is_saved(self) -> bool:
        """Whether there is a checkpoint of this very step, and of this training."""
        self.wait()
        path = self.folder.path_of(self._training.state.global_step)
        return on_rank_zero(lambda: self.folder.is_own(path) and path.is_dir())

    def find_own(self) -> Path | None:
        """Give the newest checkpoint of this training that verifies; None: there is none."""
        self.wait()
        return self.folder.find_own()

    def restore(self, path: Path) -> None:
        """Put weights, optimizer, schedule, loss scale and stream back to where `path` left them."""
        replicas = self._options.replicas
        is_replica = replicas is not None and replicas.holds(path)
        # A replica lies in memory, outside the run's folder; a checkpoint may be of another run's folder.
        run_folder = self.folder.path.parent if is_replica else path.resolve().parent.parent
        ledger = RunFolder(run_folder).ledger
        # Before the weights: other data may have made another tokenizer, and so a larger model.
        lanes = self.data.check(path, ledger)
        state = self.restore_weights(path)
        self.load_progress(state)
        self.data.go_back(state["cursor"], lanes, ledger)
        restore_random_state(path)
        self.folder.add_own(path)
        on_rank_zero(self.folder.tidy)

    def restore_weights(self, path: Path) -> dict[str, Any]:
        """Read weights and optimizer state into the engine, and give the rest of the state, which it leaves alone.

        Raises:
            CheckpointError: the checkpoint cannot be read, or does not fit the model.
        """
        replicas = self._options.replicas
        if replicas is None or not replicas.holds(path):
            state = read_checkpoint(path, self.pieces(), names=self._names)
        else:
            try:
                state = read_checkpoint(path, self.pieces(), partial(replicas.fetch, path), self._names)
            except (CheckpointError, OSError) as error:
                # The next start must not choose it again, and fail like this one.
                replicas.give_up(path)
                what, hint = "a replica in memory cannot be read", "the same command starts from the disk"
                raise CheckpointError(what, where=str(path), found=error, hint=hint) from error
        self._training.engine.after_load()
        return state

    def restore_best(self) -> None:
        """Put the weights of the checkpoint with the best metric into the model; CheckpointError: it is damaged."""
        self.wait()
        state = self._training.state
        assert state.best_model_checkpoint is not None
        path = Path(state.best_model_checkpoint)
        verify_together(path)
        metric = self._training.args.metric_for_best_model
        logger.info("the model is that of %s (%s %s)", path, metric, state.best_metric)
        self.restore_weights(path)
