"""What a checkpoint of the Trainer holds besides tensors, and how a run goes on from one."""

from __future__ import annotations

import copy
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from hfdist.checkpoint import (
    Keep,
    Replicas,
    Saver,
    export_model,
    find_newest,
    prune,
    read_checkpoint,
    read_lanes,
    read_state,
    restore_random_state,
    verify_together,
    write_lanes,
)
from hfdist.checkpoint.async_saver import SaveReport
from hfdist.checkpoint.folder import (
    HELD_OUT_LOSS,
    by_held_out_loss,
    list_checkpoints,
    original_name,
    remove_unfinished,
    step_name,
)
from hfdist.checkpoint.mirror import Uploader
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.save_plan import ADAPTER_STEM, MODEL_STEM
from hfdist.checkpoint.whole import check_holds_whole
from hfdist.collectives import gather_json, gather_texts, on_all_ranks, on_rank_zero, rank
from hfdist.config.islands import IslandsConfig
from hfdist.data import Cursor, PoolReport, report
from hfdist.data.order.lane_state import Columns
from hfdist.data.stream.ledger import Ledger
from hfdist.errors import CheckpointError, HfdistError
from hfdist.models.names.hub_names import HubNames, find_hub_names
from hfdist.models.quantize import packed_shapes
from hfdist.records import RunFolder
from hfdist.trainer.checkpointing.find import check_is_checkpoint, first_sound, newest_of
from hfdist.trainer.checkpointing.log_history import newest_entries
from hfdist.trainer.checkpointing.model_files import adapter_pieces, has_adapter, read_files, write_model_files
from hfdist.trainer.checkpointing.schedule_state import restore_schedule, schedule_state
from hfdist.trainer.checkpointing.trainer_state import TRAINER_STATE
from hfdist.trainer.hooks import overrides
from hfdist.trainer.training import Training
from hfdist.units import duration, size

logger = logging.getLogger(__name__)

_WRITTEN_ANYWAY = re.compile(r"(model|pytorch_model|adapter_model)\b.*|training_args\.bin")
"""Names of weights, and of the original's pickle."""


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
    """Where each save leaves a replica in memory, too; None: nowhere."""
    replicate_every: int | None = None
    """Steps between replicas; None: none but with the saves."""
    save_in_background: bool = True
    """Whether training goes on from a copy in memory while a checkpoint is written."""
    write_more: Callable[[Path], None] | None = None
    """Adds files to each folder of the model, on rank 0; None: nothing is added."""
    islands: IslandsConfig | None = None
    """Settings of an island, which trains the model with others; None: it trains alone."""


class OuterState(Protocol):
    """State of a training that no engine has."""

    def before_save(self) -> None:
        """Make the pieces ready for a checkpoint."""

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """List what a checkpoint holds of this rank."""


class Checkpointer:
    """Saves and restores one Trainer. All ranks call its methods together, unless a docstring says otherwise.

    It is a `RankFlag`, too: once a save has failed, all ranks raise its error after the same step.
    """

    def __init__(self, training: Training, options: SaveOptions) -> None:
        self._training, self._options = training, options
        self.outer: OuterState | None = None
        """State that the engine lacks: of the island that the Trainer is, or of the objective; None: it has all."""
        self._model_files: dict[str, bytes] | None = None
        self._is_prepared = False
        self.saver: Saver | None = None
        """Saves the checkpoints of a training; None before the first training."""
        self._own_names: set[str] = set()
        """Names of the checkpoints of `folder` that this training has saved or gone on from; others may lie there."""
        self._kept_step = -1
        """Step of the last save or replica; -1: there is none."""
        self.asks_class = False
        """Whether the class's `save_model` is called for what it adds to a checkpoint, which has the weights itself."""
        self._replica_figures: dict[str, float] = {}
        """Figures of replicas for the next training line."""

    @property
    def _stem(self) -> str:
        return ADAPTER_STEM if has_adapter(self._training.model) else MODEL_STEM

    @property
    def _names(self) -> HubNames | None:
        """The tensors of the model's files; those of an adapter have PEFT's names already."""
        model = self._training.engine.model
        return None if has_adapter(model) else find_hub_names(model)

    def begin(self) -> None:
        """Make the saver of a training that begins."""
        self.saver = Saver(
            in_background=self._options.save_in_background,
            stem=self._stem,
            names=self._names,
            write_first=self._write_counted,
            replicas=self._options.replicas,
        )
        self._model_files, self._own_names, self._kept_step = None, set(), -1
        self._is_prepared = False
        self._check_holds_whole()

    def _check_holds_whole(self) -> None:
        """Raise a CheckpointError where ranks have lost a part of the model: before a training, and at each save."""
        training = self._training
        packed = packed_shapes(training.model)
        names = {name for name, parameter in training.model.named_parameters() if parameter in packed}
        check_holds_whole(training.engine.weights(), training.strategy.whole, names)

    # ---- saving ----

    @property
    def folder(self) -> Path:
        """The folder of checkpoints: in that of a run; from Python, where the original has them, a trial's too."""
        trainer = self._training.trainer
        folder = Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))
        return folder if self._options.run_values is None else RunFolder(folder).checkpoints

    def _path(self, step: int) -> Path:
        return self.folder / (original_name if self._options.run_values is None else step_name)(step)

    def save(self) -> Path:
        """Begin to write the checkpoint of this step, and remove those that nothing keeps; `wait` waits for it.

        Gives the folder that it will have.
        """
        begin = time.monotonic()
        assert self.saver is not None
        # What the last save has left is then held for the mirror, and this one does not remove it.
        self.wait()
        cursor, stream = self.merged_cursor(), self._training.stream
        if cursor is not None and stream is not None:
            # Before the checkpoint: a run that goes on from it does not log this again.
            self._log(
                {
                    f"data/{pool.name}/{name}": value
                    for pool in report(cursor, stream.plan)
                    for name, value in pool._asdict().items()
                    if name != "name"
                }
            )
        self._note_best()
        if self._model_files is None:
            # Once: they do not change while a model is trained, and a large tokenizer takes long.
            rendered: dict[str, bytes] = {}
            on_rank_zero(lambda: rendered.update(read_files(self._write_model_files)))
            self._model_files = rendered
        path = self._path(self._training.state.global_step)
        self._save(path, cursor, begin, self._added_files(path.name) | self._model_files)
        self._own_names.add(path.name)
        return path

    def _added_files(self, name: str) -> dict[str, bytes]:
        """Give what an overridden `save_model` writes beside the weights, which are written without it."""
        files: dict[str, bytes] = {}
        trainer = self._training.trainer
        if overrides(type(trainer), "save_model"):

            def write(folder: Path) -> None:
                (folder / name).mkdir()
                # As the original calls it.
                self.asks_class = True
                try:
                    trainer.save_model(str(folder / name), _internal_call=True)
                finally:
                    self.asks_class = False

            on_all_ranks(lambda: files.update(read_files(write, leave_out=_WRITTEN_ANYWAY)))
        return {path.removeprefix(f"{name}/"): content for path, content in files.items()}

    def prepare(self) -> None:
        """Let the saver make its plan and its memory, once there is all that a checkpoint holds, before one is due."""
        if self._is_prepared:
            return
        self._is_prepared = True
        args, state = self._training.args, self._training.state
        intervals = [state.save_steps] if args.save_strategy == SaveStrategy.STEPS else []
        intervals += [] if self._options.replicate_every is None else [self._options.replicate_every]
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
        begin = time.monotonic()
        assert self.saver is not None
        is_kept = self._training.state.global_step == self._kept_step
        # A thread of another rank may be done a moment later; what it has set counts once none is busy.
        is_busy = any(gather_json(self.saver.is_busy))
        if not is_kept and not is_busy and self.saver.replicas is not None:
            self._save(None, self.merged_cursor(), begin, {})

    def _save(self, path: Path | None, cursor: Cursor | None, begin_seconds: float, files: dict[str, bytes]) -> None:
        state = self._training.state
        assert self.saver is not None
        self._check_holds_whole()
        if (ledger := self._ledger) is not None:
            ledger.count()
        if self.outer is not None:
            self.outer.before_save()
        self._training.trainer.store_flos()
        progress = copy.copy(state)
        progress.log_history = list(progress.log_history)
        progress.stateful_callbacks = cast(Any, self._states_of_callbacks())

        def write_files(folder: Path, is_replica: bool) -> None:
            for name, content in () if is_replica else files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            progress.log_history = newest_entries(progress.log_history)
            progress.save_to_json(str(folder / TRAINER_STATE))
            if lanes is not None:
                write_lanes(folder, lanes)

        # On rank 0 alone, which writes them; now, as training goes on meanwhile.
        at, lanes = (None, None) if cursor is None or rank() != 0 else cursor.to_columns()
        self.saver.save(
            path,
            step=state.global_step,
            pieces=self.pieces(),
            state=self.progress_state() | self._state(at),
            write_files=write_files,
            keep=self._keep(),
            begin_seconds=begin_seconds,
        )
        self._kept_step = state.global_step

    def _note_best(self) -> None:
        """Name the checkpoint with the best metric so far, if there is one or will be."""
        state = self._training.state
        if not state.best_global_step:
            return
        path = self._path(state.best_global_step)
        is_known = state.best_global_step == state.global_step or state.best_model_checkpoint == str(path)
        if is_known or on_rank_zero(path.is_dir):
            state.best_model_checkpoint = str(path)

    def _states_of_callbacks(self) -> dict[str, object]:
        """States of the callbacks by class, as the original Trainer has them; several of one class are a list."""
        states: dict[str, list[object]] = {}
        for callback in [*self._training.callbacks, self._training.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(copy.deepcopy(callback.state()))
        return {name: own if len(own) > 1 else own[0] for name, own in states.items()}

    def _keep(self) -> Keep | None:
        limit, state = self._training.args.save_total_limit, self._training.state
        # As in the original, 0 and less mean all.
        keep: Keep | None = self._options.keep or (Keep(newest=limit) if limit and limit > 0 else None)
        if keep is None:
            return None
        # Not only the latest steps: an earlier training that went further may have used the folder.
        named = {self._path(state.global_step).name, Path(state.best_model_checkpoint or "").name}
        uploader = self._options.uploader
        return replace(keep, named=frozenset(named), held=frozenset() if uploader is None else uploader.held)

    def _state(self, cursor: Mapping[str, object] | None) -> dict[str, object]:
        held_out_loss = self.last_held_out_loss()
        return {
            "cursor": cursor,
            "config": self._options.run_values,
            # JSON has no NaN, and such a loss is not the best.
            HELD_OUT_LOSS: held_out_loss if held_out_loss is not None and math.isfinite(held_out_loss) else None,
        }

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

    def pieces(self) -> Iterator[Piece]:
        """List what is kept of tensors: all of the model, or its adapter alone; and the outer state."""
        pieces = self._training.engine.pieces()
        return adapter_pieces(self._training.model, pieces if self.outer is None else self.outer.pieces(pieces))

    def _write_model_files(self, folder: Path) -> None:
        trainer = self._training.trainer
        # As in the original, that of the collator where the Trainer was given none.
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        write_model_files(self._training.model, tokenizer, folder)
        if self._options.write_more is not None:
            self._options.write_more(folder)

    def export(self, folder: Path) -> None:
        """Write a Hub folder with the weights as they are, or a PEFT folder of an adapter."""
        self._check_holds_whole()
        export_model(folder, self.pieces(), self._write_model_files, stem=self._stem, names=self._names)

    def is_saved(self) -> bool:
        """Whether there is a checkpoint of this very step, and of this training."""
        self.wait()
        path = self._path(self._training.state.global_step)
        return on_rank_zero(lambda: self._is_own(path) and path.is_dir())

    @property
    def has_own(self) -> bool:
        """Whether this training has saved a checkpoint, or has begun with one of its folder."""
        return bool(self._own_names)

    def _is_own(self, path: Path) -> bool:
        # The folder of a run has no others: those of its earlier starts count, too.
        return self._options.run_values is not None or path.name in self._own_names

    def find_own(self) -> Path | None:
        """Give the newest checkpoint of this training that verifies; None: there is none."""
        self.wait()
        if self._options.run_values is not None:
            return find_newest(self.folder)
        own = on_rank_zero(lambda: [str(path) for path in list_checkpoints(self.folder) if self._is_own(path)])
        return first_sound(reversed(own))

    # ---- waiting for a save ----

    def wait(self) -> None:
        """Wait until nothing is being saved, and log it. A failed save raises its error, on all ranks alike."""
        if self.saver is not None:
            self.saver.wait()
            self._report_saves()

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
        """1 if this rank knows of a save that has failed, else 0. Any one rank may call it."""
        self._report_saves()
        return int(self.saver is not None and self.saver.has_failed)

    def on_flag(self, flag: int, state: TrainerState, control: TrainerControl) -> None:
        """Raise the error of the save."""
        self.wait()

    def _report_saves(self) -> None:
        """Log the saves that have ended since the last call."""
        for saved in [] if self.saver is None else self.saver.take_reports():
            if saved.is_replica:
                self._note_replica(saved)
            elif self._training.trainer.is_world_process_zero():
                logger.info(
                    "%s: %s in %s; training stood still for %s",
                    saved.path.name,
                    size(saved.num_bytes),
                    duration(saved.total_seconds),
                    duration(saved.stall_seconds),
                )
                self._log(
                    {
                        "checkpoint/step": saved.step,
                        "checkpoint/bytes": saved.num_bytes,
                        "checkpoint/seconds": saved.total_seconds,
                        "checkpoint/stall_seconds": saved.stall_seconds,
                    }
                )
                if self._options.uploader is not None:
                    self._options.uploader.put(saved.path)
        self.report_uploads()

    def report_uploads(self) -> None:
        """Log the uploads to the mirror that have ended since the last call. Any one rank may call it."""
        uploader = self._options.uploader
        for upload in [] if uploader is None else uploader.take_uploads():
            figures: dict[str, float] = {
                "mirror/step": upload.step,
                "mirror/bytes": upload.sent.all_bytes,
                "mirror/sent_bytes": upload.sent.new_bytes,
                "mirror/seconds": upload.seconds,
                "mirror/failures": upload.num_failures,
                "mirror/failed": int(upload.has_failed),
            }
            if upload.newest_step is not None:
                figures["mirror/newest_step"] = upload.newest_step
            self._log(figures)

    def _note_replica(self, saved: SaveReport) -> None:
        """Keep the figures of a replica for the next training line, which counts the stalls of all since the last."""
        stall = self._replica_figures.get("replica/stall_seconds", 0.0) + saved.stall_seconds
        self._replica_figures = {
            "replica/step": saved.step,
            "replica/bytes": saved.num_bytes,
            "replica/seconds": saved.total_seconds,
            "replica/stall_seconds": stall,
        }

    def replica_figures(self) -> dict[str, float]:
        """Give what a training line says of the newest replica since the last line, if there is one, on this rank."""
        figures, self._replica_figures = self._replica_figures, {}
        return figures

    def _log(self, figures: dict[str, float]) -> None:
        # Not by the class's own `log`: one that adds its metrics to each line must not spend them on this one.
        with self._training.without_epoch():
            Trainer.log(self._training.trainer, figures)

    # ---- what was read ----

    @property
    def _ledger(self) -> Ledger | None:
        stream = self._training.stream
        return None if stream is None else stream.ledger

    def write_ledger(self) -> None:
        """Write down what was read so far."""
        ledger = self._ledger
        on_all_ranks(lambda: None if ledger is None else ledger.flush())

    def _write_counted(self) -> None:
        # What the checkpoint counts, before there is one; a resume cuts off what comes after the last checkpoint.
        if (ledger := self._ledger) is not None:
            ledger.write_counted()

    def merged_cursor(self) -> Cursor | None:
        """Give the cursor of the whole stream: each data rank knows only its own lanes. A collective."""
        stream = self._training.stream
        if stream is None:
            return None
        islands = self._options.islands
        readers = 1 if islands is None or stream.shares is not None else islands.shares
        of_ranks = map(Cursor.from_bytes, gather_texts(stream.cursor().to_bytes(), None))
        return Cursor.merge(list(of_ranks), readers=readers)

    def data_reports(self) -> list[PoolReport]:
        """Say how much of each pool of documents the run has read. A collective."""
        cursor, stream = self.merged_cursor(), self._training.stream
        return [] if cursor is None or stream is None else report(cursor, stream.plan)

    def last_held_out_loss(self) -> float | None:
        """The held-out loss, if this very step was evaluated. Any one rank may call it."""
        state = self._training.state
        last = next((entry for entry in reversed(state.log_history) if "eval_loss" in entry), None)
        return float(last["eval_loss"]) if last is not None and last["step"] == state.global_step else None

    # ---- resuming ----

    def find_start(self, asked: str | bool) -> str:
        """Give the checkpoint of this path, or for True the newest of the output folder that verifies."""
        if asked is True:
            return str(newest_of(self.folder))
        path = Path(str(asked))
        check_is_checkpoint(path)
        if self._options.run_values is None:
            # A run has verified what it gives.
            verify_together(path)
        return str(path)

    def restore(self, path: Path) -> None:
        """Put weights, optimizer, schedule, loss scale and stream back to where `path` left them."""
        stream, replicas = self._training.stream, self._options.replicas
        is_replica = replicas is not None and replicas.holds(path)
        beside = RunFolder(self.folder.parent if is_replica else path.resolve().parent.parent).ledger
        # From Python there is none, except one that the stream was given.
        ledger = beside if beside.is_dir() else None
        lanes: Columns | None = None
        if stream is not None:
            # Before the weights: other data may have made another tokenizer, and so a larger model.
            cursor = on_rank_zero(lambda: read_state(path)["cursor"])

            def check() -> None:
                nonlocal lanes
                lanes = read_lanes(path)
                stream.check_identity(cursor, lanes, ledger=ledger)

            on_all_ranks(check, is_told=False)
        state = self.restore_weights(path)
        self.load_progress(state)
        if stream is not None:
            on_all_ranks(lambda: stream.load_state_dict(state["cursor"], lanes, ledger=ledger), is_told=False)
        restore_random_state(path)
        if path.resolve().parent == self.folder.resolve():
            self._own_names.add(path.resolve().name)
        on_rank_zero(self._tidy)

    def restore_weights(self, path: Path) -> dict[str, Any]:
        """Read weights and optimizer state into the engine; give the rest of the state. No resume by itself."""
        replicas = self._options.replicas
        if replicas is None or not replicas.holds(path):
            state = read_checkpoint(path, self.pieces(), names=self._names)
        else:
            try:
                state = read_checkpoint(path, self.pieces(), partial(replicas.fetch, path), self._names)
            except (CheckpointError, OSError) as error:
                # Else each start would fail like this one.
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

    def find_best(self) -> tuple[Path, float] | None:
        """Give the run's checkpoint with the lowest held-out loss that verifies, and the loss. A collective."""
        losses = dict(on_rank_zero(lambda: [(str(path), loss) for path, loss in by_held_out_loss(self.folder)]))
        found = first_sound(losses)
        return None if found is None else (found, float(losses[str(found)]))

    def _tidy(self) -> None:
        """Remove what a run that was killed after its last save has left: no later save may come to do it."""
        folder, keep = self.folder, self._keep()
        if folder.is_dir():
            remove_unfinished(folder)
            if keep is not None:
                prune(folder, keep)
