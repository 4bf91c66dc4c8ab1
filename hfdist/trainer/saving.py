"""What a checkpoint of the Trainer holds besides tensors, and how a run goes on from one."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from hfdist.checkpoint import Keep, export_model, prune, read_checkpoint, restore_random_state, write_checkpoint
from hfdist.checkpoint.exchange import gather_json, on_all_ranks
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.retention import HELD_OUT_LOSS
from hfdist.data import Cursor, PoolReport, TokenStream, report

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of a save.

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
TRAINER_STATE = "trainer_state.json"


def save(trainer: Any) -> Path:
    """Write `<output_dir>/checkpoints/step-N` and remove the oldest beyond `save_total_limit`. Call on all ranks."""
    folder = Path(trainer.args.output_dir) / CHECKPOINTS
    # Before the checkpoint that counts it; behind the last checkpoint it is cut off at a resume.
    write_ledger(trainer)

    def write_files(path: Path) -> None:
        _write_model_files(trainer, path)
        trainer.state.save_to_json(str(path / TRAINER_STATE))

    saved = write_checkpoint(
        folder,
        step=trainer.state.global_step,
        pieces=trainer.engine.pieces(),
        state=_state(trainer),
        write_model_files=write_files,
    )
    limit = trainer.args.save_total_limit
    keep = trainer.keep or (None if limit is None else Keep(newest=limit))
    if keep is not None:
        prune(folder, keep)
    return saved


def write_ledger(trainer: Any) -> None:
    """Write down what was read, so far. Call on all ranks."""
    dataset = trainer.train_dataset
    if isinstance(dataset, TokenStream):
        on_all_ranks(lambda: None if dataset.ledger is None else dataset.ledger.flush())


def last_held_out_loss(trainer: Any) -> float | None:
    """As evaluated at this very step, if it was."""
    last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), None)
    return float(last["eval_loss"]) if last is not None and last["step"] == trainer.state.global_step else None


def is_saved(trainer: Any) -> bool:
    """Whether there is a checkpoint of this very step."""
    return (Path(trainer.args.output_dir) / CHECKPOINTS / step_name(trainer.state.global_step)).is_dir()


def export(trainer: Any, folder: Path) -> None:
    """Write a Hub folder with the weights as they are. Call on all ranks."""
    export_model(folder, trainer.engine.pieces(), lambda path: _write_model_files(trainer, path))


def restore(trainer: Any, path: Path) -> None:
    """Put the weights, the optimizer, the schedule, the loss scale and the stream back to where `path` left them."""
    state = read_checkpoint(path, trainer.engine.pieces())
    trainer.engine.loaded()
    trainer.engine.restore_numbers(state["engine"])
    _restore_schedule(trainer, state["schedule_steps"])
    if trainer.accelerator.scaler is not None and state["loss_scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(state["loss_scaler"])
    if isinstance(trainer.train_dataset, TokenStream):
        trainer.train_dataset.load_state_dict(state["cursor"])
    restore_random_state(path)


def _state(trainer: Any) -> dict[str, Any]:
    scaler, cursor = trainer.accelerator.scaler, merged_cursor(trainer)
    held_out_loss = last_held_out_loss(trainer)
    return {
        "schedule_steps": trainer.lr_scheduler.last_epoch,
        "engine": trainer.engine.numbers(),
        "loss_scaler": None if scaler is None else scaler.state_dict(),
        "cursor": None if cursor is None else cursor.to_json(),
        "config": trainer.run_values,
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


def data_figures(trainer: Any) -> dict[str, float]:
    """The same as figures to log: `data/NAME/share` and so on. Call on all ranks."""
    return {
        f"data/{pool.name}/{name}": value
        for pool in data_reports(trainer)
        for name, value in pool._asdict().items()
        if name != "name"
    }


def _write_model_files(trainer: Any, path: Path) -> None:
    config = copy.deepcopy(trainer.model.config)
    # What `PreTrainedModel.save_pretrained` fills in; and a cache, which training has switched off.
    config.architectures = [type(trainer.model).__name__]
    config.dtype = next(trainer.model.parameters()).dtype
    config.use_cache = True
    config.save_pretrained(path)
    if trainer.model.can_generate():
        _save_generation_config(trainer.model.generation_config, path)
    if trainer.processing_class is not None:
        _save_tokenizer(trainer.processing_class, path)


def _save_generation_config(config: Any, path: Path) -> None:
    try:
        config.save_pretrained(path)
    except ValueError as error:
        # Some Hub models carry one that transformers itself refuses to write; weights must not be lost over it.
        logger.warning("generation_config.json is left out: %s", str(error).splitlines()[0])


def _save_tokenizer(tokenizer: Any, path: Path) -> None:
    try:
        tokenizer.save_pretrained(path)
    except Exception as error:
        # The tokenizers library tells the system's errors in words alone.
        number = re.search(r"\(os error (\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _restore_schedule(trainer: Any, steps: int) -> None:
    """Schedules are functions of the step alone: set it, and compute the rates again."""
    scheduler = trainer.lr_scheduler
    rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.last_epoch = steps
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
