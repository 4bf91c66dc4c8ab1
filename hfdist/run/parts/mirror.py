"""The part of a run that mirrors its checkpoints: a start takes a newer one from the mirror, the end waits for it."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import TrainerCallback

from hfdist.atomic_write import write_atomically
from hfdist.checkpoint.folder import Keep, list_checkpoints, step_of, temporary
from hfdist.checkpoint.mirror import Mirror, Objects, Uploader, fetch_best, fetch_newer
from hfdist.errors import CheckpointError, ResourceError
from hfdist.records import RunFolder
from hfdist.records.lines import earlier, set_aside
from hfdist.run.parts.part import Joins, Part
from hfdist.run.state import RunState
from hfdist.trainer.checkpointing.start import check_resume, lies_in
from hfdist.units import size

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Seconds between two looks whether a wait is given up."""
_LINE_SECONDS = 10.0
"""Seconds between two log lines of a wait."""
_MOST_TRIES = 3
"""How often the end of a run tries to upload the newest checkpoint again."""


class MirrorPart(Part):
    """Takes a newer checkpoint from the mirror at the start, and waits until the mirror has the newest at the end."""

    joins = Joins.training

    def open(self, run: RunState) -> None:
        """Find the mirror, and bring its newest checkpoint here, if the folder has none as new. Set `run.uploader`.

        Raises:
            CheckpointError: nothing there can be used, and the folder has nothing either; or `checkpoint.resume` does
                not fit the checkpoints of the mirror.
            ResourceError: the mirror does not answer, and the folder has no checkpoint.
        """
        config, checkpoint = run.config, run.config.checkpoint
        if checkpoint.mirror is None:
            return
        mirror = Mirror(Objects(f"{checkpoint.mirror.rstrip('/')}/{config.run.name}"))
        keep = Keep(newest=checkpoint.keep, every=checkpoint.keep_every, best=checkpoint.keep_best)
        names = _find(mirror, run)
        folder = RunFolder(config.run.folder.path.absolute())
        run.uploader = Uploader(mirror, keep, step_of(names[-1]) if names else None, folder.records)

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Begin to upload the checkpoint of the start, as a killed run may not have done so; give no callback."""
        start = run.start
        if run.uploader is not None and start.checkpoint is not None and start.goes_on and not start.in_memory:
            run.uploader.put(Path(start.checkpoint))
        return ()

    @contextmanager
    def during(self, run: RunState) -> Iterator[None]:
        """Give up at the end of the block what is not uploaded by then."""
        try:
            yield
        finally:
            if run.uploader is not None:
                run.uploader.end()

    def stop(self, run: RunState) -> None:
        """Wait for the last upload: the machine may be taken away. Another signal ends the wait."""
        _wait(run, lambda: run.preemption.is_hurried)

    def finish(self, run: RunState) -> None:
        """Wait for the last upload."""
        _wait(run)


def _find(mirror: Mirror, run: RunState) -> list[str]:
    """Give the names of the mirror's checkpoints, the oldest first, once the newest and its records are here."""
    config = run.config
    checkpoints = config.run.folder.checkpoints
    try:
        names = mirror.open()
        if names:
            newest = f"{names[-1]}, {mirror.shown}"
            _check_resume(config.checkpoint.resume, checkpoints, newest, step_of(names[-1]))
        _bring_newest(mirror, names, run)
        if config.checkpoint.keep_best:
            fetch_best(mirror, names, checkpoints)
        with suppress(ResourceError):
            # If this fails, the first upload tries again, and says why it cannot.
            mirror.claim()
    except ResourceError as error:
        if not list_checkpoints(checkpoints):
            # To begin anew would give up what the mirror may have.
            hint = f"{error.hint}; checkpoint.mirror=null starts without it"
            raise ResourceError(error.what, where=error.where, found=error.found, hint=hint) from error
        logger.warning("the run goes on from its folder: %s", error)
        names = []
    return names


def _bring_newest(mirror: Mirror, names: Sequence[str], run: RunState) -> None:
    """Bring the newest checkpoint into the run's folder, where that is older, and then the records that go with it."""
    folder = run.config.run.folder
    with_records = _checkpoint_of_records(names, run)
    fetched = fetch_newer(mirror, names, folder.checkpoints)
    if fetched is not None:
        check_resume(run.config)
    here = list_checkpoints(folder.checkpoints)
    newest = here[-1].name if here else ""
    has_records = fetched is None and newest == with_records and folder.ledger.exists()
    if newest in names and not has_records:
        _bring_records(mirror, newest, run)
    folder.awaited_records.unlink(missing_ok=True)


def _checkpoint_of_records(names: Sequence[str], run: RunState) -> str:
    """Give the name of the checkpoint that the folder's records go with; empty: they go with none.

    It is written down before a newer checkpoint comes. A start that is killed between the checkpoint and its records
    so tells the next start to bring them.
    """
    folder = run.config.run.folder
    here = list_checkpoints(folder.checkpoints)
    newest = here[-1].name if here else ""
    if folder.awaited_records.is_file():
        return folder.awaited_records.read_text(encoding="utf-8", errors="replace")
    if names and step_of(names[-1]) > step_of(newest):
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.awaited_records, newest.encode())
    return newest


def _bring_records(mirror: Mirror, name: str, run: RunState) -> None:
    """Bring the records beside a checkpoint into the run's folder, in place of those of an older one."""
    folder = run.config.run.folder
    for left_over in folder.path.glob("records.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = temporary(folder.path / "records")
    try:
        unfinished.mkdir()
        if not mirror.fetch_beside(name, unfinished, folder.is_record):
            return
        brought_folder = RunFolder(unfinished)
        if run.recorder is not None:
            run.recorder.follow(brought_folder)
        for here, brought in zip(folder.step_lines, brought_folder.step_lines, strict=True):
            set_aside(here)
            if brought.is_file():
                os.replace(brought, here)
        if brought_folder.ledger.is_dir():
            # The ledger comes last: a start that finds it knows that it has all records.
            if folder.ledger.exists():
                shutil.rmtree(earlier(folder.ledger), ignore_errors=True)
                folder.ledger.rename(earlier(folder.ledger))
            brought_folder.ledger.rename(folder.ledger)
    except CheckpointError as error:
        logger.warning("the run goes on without the records of its earlier steps: %s", error)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_resume(resume: str, checkpoints: Path, newest: str, newest_step: int) -> None:
    """Refuse a `checkpoint.resume` that does not fit the newest checkpoint of the mirror."""
    if resume == "never":
        what = "the mirror already holds checkpoints of this run"
        hint = "another run.name, or checkpoint.resume=auto to go on from it"
        raise CheckpointError(what, where="checkpoint.resume=never", found=newest, hint=hint)
    path = Path(resume)
    if resume != "auto" and lies_in(path, checkpoints) and step_of(path.resolve().name) < newest_step:
        what = "the mirror holds later checkpoints, and two branches cannot share one"
        hint = "another run.name, or remove the later step-*.json from the mirror, too"
        raise CheckpointError(what, where="checkpoint.resume", found=newest, hint=hint)


def _wait(run: RunState, is_given_up: Callable[[], bool] = lambda: False) -> None:
    """Wait until all is uploaded, at most as long as the config says; log what the mirror lacks then.

    An upload of the newest checkpoint that has failed is tried again.
    """
    uploader, minutes = run.uploader, run.config.checkpoint.mirror_minutes
    if uploader is None:
        return
    here = list_checkpoints(run.config.run.folder.checkpoints)
    newest = here[-1] if here else None
    next_line = time.monotonic()
    end, wait_seconds, num_tries = next_line + 60 * minutes, 0.0, 0
    while True:
        # Done: nothing is being uploaded any more, whether or not it has succeeded.
        is_done = uploader.wait(wait_seconds)
        has_all = newest is None or uploader.newest_step == step_of(newest.name)
        is_late = time.monotonic() >= end
        if is_late or is_given_up():
            break
        if is_done and (has_all or num_tries == _MOST_TRIES):
            break
        if is_done and newest is not None:
            num_tries += 1
            uploader.put(newest)
        if time.monotonic() >= next_line:
            sent = uploader.progress
            so_far = f": {size(sent.done_bytes)} of {size(sent.all_bytes)}" if sent.all_bytes else ""
            logger.info("waiting for the mirror%s", so_far)
            next_line += _LINE_SECONDS
        wait_seconds = min(_LOOK_SECONDS, max(end - time.monotonic(), 0.0))
    run.trainer.checkpointer.log.add_uploads()
    if newest is not None and uploader.newest_step != step_of(newest.name):
        there = "no checkpoint" if uploader.newest_step is None else f"step {uploader.newest_step:,} as its newest"
        why = f" after checkpoint.mirror_minutes={minutes:g}" if is_late and not is_done else ""
        logger.warning("the mirror lacks %s%s, and has %s", newest, why, there)
