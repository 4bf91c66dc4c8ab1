"""What a checkpoint of the Trainer holds besides tensors, and how a run goes on from one."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from hfdist.checkpoint import (
    Keep,
    Saver,
    export_model,
    find_newest,
    prune,
    read_checkpoint,
    read_state,
    restore_random_state,
    verify,
)
from hfdist.checkpoint.folder import HELD_OUT_LOSS, by_held_out_loss, original_name, remove_unfinished, step_name
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.save_plan import ADAPTER_STEM, MODEL_STEM
from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero
from hfdist.data import LEDGER, Cursor, PoolReport, TokenStream, report
from hfdist.errors import CheckpointError, HfdistError
from hfdist.trainer.checkpointing import lr_scheduler
from hfdist.trainer.checkpointing.adapter_files import adapter_pieces, has_adapter
from hfdist.trainer.checkpointing.log_history import newest_entries
from hfdist.trainer.checkpointing.model_files import RenderedModelFiles, write_model_files

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of a save.

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
TRAINER_STATE = "trainer_state.json"


class Saving:
    """What a Trainer keeps for its saves, from the beginning of training on. Make it on all ranks."""

    def __init__(self, trainer: Any, *, in_background: bool) -> None:
        self.saver = Saver(
            in_background=in_background, stem=stem_of(trainer), write_first=lambda: _write_counted(trainer)
        )
        self.model_files: RenderedModelFiles | None = None

    def render_model_files(self, trainer: Any) -> RenderedModelFiles:
        """Make them with the first save: they do not change. Call on all ranks."""
        if self.model_files is None:
            rendered = RenderedModelFiles()
            on_rank_zero(lambda: rendered.render(trainer))
            self.model_files = rendered
        return self.model_files


def folder_of(trainer: Any) -> Path:
    """Give the folder of checkpoints: in that of a run; from Python, where the original has them, a trial's too."""
    folder = Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))
    return folder if trainer.options.run_values is None else folder / CHECKPOINTS


def _path_of(trainer: Any, step: int) -> Path:
    return folder_of(trainer) / (original_name(step) if trainer.options.run_values is None else step_name(step))


def _note_best(trainer: Any) -> None:
    """Name the checkpoint with the best metric so far, if there is one or will be. Call on all ranks."""
    state = trainer.state
    if not state.best_global_step:
        return
    path = _path_of(trainer, state.best_global_step)
    is_known = state.best_global_step == state.global_step or state.best_model_checkpoint == str(path)
    if is_known or on_rank_zero(path.is_dir):
        state.best_model_checkpoint = str(path)


def save(trainer: Any) -> None:
    """Write the checkpoint of this step, and remove those that nothing keeps. Call on all ranks.

    It goes on beside the training: `wait` waits for it.
    """
    begin = time.monotonic()
    saving: Saving = trainer.saving
    cursor = merged_cursor(trainer)
    if cursor is not None:
        # Before the checkpoint: a run that goes on from it does not say this again.
        _log(trainer, _data_figures(report(cursor, trainer.train_dataset.plan)))
        if trainer.train_dataset.ledger is not None:
            trainer.train_dataset.ledger.count()
    trainer.store_flos()
    _note_best(trainer)
    model_files = saving.render_model_files(trainer)
    progress = copy.copy(trainer.state)
    progress.log_history = list(progress.log_history)
    progress.stateful_callbacks = _states_of_callbacks(trainer)

    def write_files(path: Path) -> None:
        model_files.write(path)
        progress.log_history = newest_entries(progress.log_history)
        progress.save_to_json(str(path / TRAINER_STATE))

    saving.saver.save(
        _path_of(trainer, trainer.state.global_step),
        step=trainer.state.global_step,
        pieces=_pieces(trainer),
        state=_state(trainer, cursor),
        write_model_files=write_files,
        keep=_keep(trainer),
        begin_seconds=begin,
    )


def _states_of_callbacks(trainer: Any) -> dict[str, Any]:
    """By class, as the original has them; of several of one class a list."""
    states: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(copy.deepcopy(callback.state()))
    return {name: own if len(own) > 1 else own[0] for name, own in states.items()}


def wait(trainer: Any) -> None:
    """Wait until nothing is being saved, and report it. Call on all ranks.

    Raises:
        CheckpointError, NumericsError, ResourceError: a save has failed; on all ranks alike.
    """
    if trainer.saving is not None:
        trainer.saving.saver.wait()
        report_saves(trainer)


def is_awaited(trainer: Any) -> bool:
    """Whether a callback of the user's own is told of each save, and so may open the folder as soon as it is told."""
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    return any(
        kind.on_save is not TrainerCallback.on_save and kind.__module__.split(".")[0] not in ("hfdist", "transformers")
        for kind in kinds
    )


@contextmanager
def settled(trainer: Any) -> Iterator[None]:
    """Wait at an error that has words: a save that goes on is worth its time. A training that ends well has waited."""
    try:
        yield
    except HfdistError:
        with suppress(HfdistError):
            wait(trainer)
        raise


def report_saves(trainer: Any) -> None:
    """Log the saves that have ended since the last call."""
    for saved in trainer.saving.saver.take_reports():
        if not trainer.is_world_process_zero():
            continue
        logger.info(
            "%s: %.3f GB in %.2f s; training stood still for %.2f s",
            *(saved.path.name, saved.num_bytes / 1e9, saved.total_seconds, saved.stall_seconds),
        )
        _log(
            trainer,
            {
                "checkpoint/step": saved.step,
                "checkpoint/bytes": saved.num_bytes,
                "checkpoint/seconds": saved.total_seconds,
                "checkpoint/stall_seconds": saved.stall_seconds,
            },
        )


def _log(trainer: Any, figures: dict[str, float]) -> None:
    """Log a line that is not of a step: a class that adds its metrics to each line must not spend them on this one."""
    Trainer.log(trainer, figures)


class SaveListener:
    """Ends the run, on all ranks in the same step, once a save has failed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def wish(self) -> int:
        """1: this rank knows of a failure."""
        report_saves(self._trainer)
        return int(self._trainer.saving.saver.has_failed)

    def agreed(self, wish: int, state: TrainerState, control: TrainerControl) -> None:
        """Raise what the save has raised."""
        wait(self._trainer)


def num_samples(trainer: Any) -> int:
    """Sequences of the stream that the whole run has read; 0: other data."""
    dataset = trainer.train_dataset
    return int(dataset.state_dict()["samples"]) if isinstance(dataset, TokenStream) else 0


def write_ledger(trainer: Any) -> None:
    """Write down what was read, so far. Call on all ranks."""
    dataset = trainer.train_dataset
    if isinstance(dataset, TokenStream):
        on_all_ranks(lambda: None if dataset.ledger is None else dataset.ledger.flush())


def _write_counted(trainer: Any) -> None:
    """Write what the checkpoint counts before there is one; behind the last checkpoint it is cut off at a resume."""
    dataset = trainer.train_dataset
    if isinstance(dataset, TokenStream) and dataset.ledger is not None:
        dataset.ledger.write_counted()


def last_held_out_loss(trainer: Any) -> float | None:
    """As evaluated at this very step, if it was."""
    last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), None)
    return float(last["eval_loss"]) if last is not None and last["step"] == trainer.state.global_step else None


def is_saved(trainer: Any) -> bool:
    """Whether there is a checkpoint of this very step. Call on all ranks."""
    wait(trainer)
    return _path_of(trainer, trainer.state.global_step).is_dir()


def export(trainer: Any, folder: Path) -> None:
    """Write a Hub folder with the weights as they are, or a PEFT folder of an adapter's. Call on all ranks."""
    stem = stem_of(trainer)
    export_model(folder, _pieces(trainer), lambda path: write_model_files(trainer, path), stem=stem)


def stem_of(trainer: Any) -> str:
    """Of the files of weights that this Trainer writes."""
    return ADAPTER_STEM if has_adapter(trainer.model) else MODEL_STEM


def _pieces(trainer: Any) -> Iterator[Piece]:
    """What is kept: all of the model, or its adapter alone."""
    return adapter_pieces(trainer.model, trainer.engine.pieces())


def restore(trainer: Any, path: Path) -> None:
    """Put the weights, the optimizer, the schedule, the loss scale and the stream back to where `path` left them."""
    stream = trainer.train_dataset if isinstance(trainer.train_dataset, TokenStream) else None
    beside = path.resolve().parents[1] / LEDGER
    # From Python there is none, but for one that the stream was given.
    ledger = beside if beside.is_dir() else None
    if stream is not None:
        # Before the weights: other data may have made another tokenizer, and that the model larger.
        on_all_ranks(lambda: stream.check_identity(read_state(path)["cursor"], ledger=ledger))
    state = restore_weights(trainer, path)
    trainer.engine.restore_numbers(state["engine"])
    lr_scheduler.restore(trainer.lr_scheduler, state)
    if trainer.accelerator.scaler is not None and state["loss_scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(state["loss_scaler"])
    if stream is not None:
        on_all_ranks(lambda: stream.load_state_dict(state["cursor"], ledger=ledger))
    restore_random_state(path)
    on_rank_zero(lambda: _tidy(trainer))


@contextmanager
def arguments_of(path: Path, args: Any) -> Iterator[None]:
    """Let `args` have the micro batch and the intervals of a checkpoint: the original warns of others."""
    saved = TrainerState.load_from_json(str(path / TRAINER_STATE))
    before = {"per_device_train_batch_size": int(saved.train_batch_size or 0)}
    before |= {name: getattr(saved, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    own = {name: getattr(args, name) for name in before}
    vars(args).update(before)
    try:
        yield
    finally:
        vars(args).update(own)


def restore_weights(trainer: Any, path: Path) -> dict[str, Any]:
    """Read what the engine holds, weights and what the optimizer keeps, and give the rest of the state.

    Call on all ranks. Training does not go on from this alone.
    """
    state = read_checkpoint(path, _pieces(trainer))
    trainer.engine.loaded()
    return state


def restore_best(trainer: Any) -> None:
    """Put the weights of the checkpoint with the best metric into the model. Call on all ranks.

    Raises:
        CheckpointError: it is damaged.
    """
    wait(trainer)
    path = Path(trainer.state.best_model_checkpoint)
    on_rank_zero(lambda: verify(path))
    logger.info("the model is that of %s (%s %s)", path, trainer.args.metric_for_best_model, trainer.state.best_metric)
    restore_weights(trainer, path)


def find_start(trainer: Any, wish: str | bool) -> str:
    """Give the checkpoint of this path, or for True the newest of the output folder that verifies. Call on all ranks.

    Raises:
        CheckpointError: there is none, or that of the path is damaged or another program's.
    """
    if wish is not True:
        if trainer.options.run_values is None:
            # A run has verified what it gives.
            on_rank_zero(lambda: verify(Path(str(wish))))
        return str(wish)
    folder = folder_of(trainer)
    found = find_newest(folder)
    if found is None:
        raise CheckpointError("there is no checkpoint to go on from", where=str(folder), hint="train() begins anew")
    return str(found)


def find_best_checkpoint(trainer: Any) -> tuple[Path, float] | None:
    """Give the run's checkpoint with the lowest held-out loss that verifies, and the loss. Call on all ranks."""

    def find() -> list[Any] | None:
        for path, loss in by_held_out_loss(folder_of(trainer)):
            try:
                verify(path)
            except CheckpointError as error:
                logger.warning("%s is passed over: %s", path, error.what)
            else:
                return [str(path), loss]
        return None

    found = on_rank_zero(find)
    return None if found is None else (Path(found[0]), float(found[1]))


def _tidy(trainer: Any) -> None:
    """Remove what a run that was killed behind its last save has left: no save may come that would."""
    folder, keep = folder_of(trainer), _keep(trainer)
    if folder.is_dir():
        remove_unfinished(folder)
        if keep is not None:
            prune(folder, keep)


def _keep(trainer: Any) -> Keep | None:
    limit = trainer.args.save_total_limit
    # As in the original, 0 and less mean all.
    keep: Keep | None = trainer.options.keep or (Keep(newest=limit) if limit is not None and limit > 0 else None)
    if keep is None:
        return None
    # Not only the latest steps: an earlier training that went further may have used the folder.
    named = {_path_of(trainer, trainer.state.global_step).name, Path(trainer.state.best_model_checkpoint or "").name}
    return replace(keep, named=frozenset(named))


def _state(trainer: Any, cursor: Cursor | None) -> dict[str, Any]:
    scaler = trainer.accelerator.scaler
    held_out_loss = last_held_out_loss(trainer)
    return {
        **lr_scheduler.state_of(trainer.lr_scheduler),
        "engine": trainer.engine.numbers(),
        "loss_scaler": None if scaler is None else scaler.state_dict(),
        "cursor": None if cursor is None else cursor.to_json(),
        "config": trainer.options.run_values,
        # JSON has no NaN, and such a loss is not the best.
        HELD_OUT_LOSS: held_out_loss if held_out_loss is not None and math.isfinite(held_out_loss) else None,
    }


def merged_cursor(trainer: Any) -> Cursor | None:
    """Where the whole stream stands, since each data rank knows only its own lanes. Call on all ranks."""
    if not isinstance(trainer.train_dataset, TokenStream):
        return None
    cursors = gather_json(trainer.train_dataset.state_dict())
    return Cursor.merge([Cursor.from_json(cursor) for cursor in cursors])


def data_reports(trainer: Any) -> list[PoolReport]:
    """How much of each pool of documents the run has read. Call on all ranks."""
    cursor = merged_cursor(trainer)
    return [] if cursor is None else report(cursor, trainer.train_dataset.plan)


def _data_figures(reports: list[PoolReport]) -> dict[str, float]:
    """The same as figures to log: `data/NAME/share` and so on."""
    return {
        f"data/{pool.name}/{name}": value
        for pool in reports
        for name, value in pool._asdict().items()
        if name != "name"
    }
