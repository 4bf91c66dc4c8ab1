"""A run on a file system that is too small for its next checkpoint, or whose files may not grow."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hfdist.config.run import RunConfig
from hfdist.errors import HfdistError
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.trainer import Trainer
from recipes.pretrain import main
from tests.distributed.disk_faults import STEP, make_small_config
from tests.distributed.faults import Reference, read_run
from tests.distributed.kills import newest_whole
from tests.distributed.processes import LONGEST_SECONDS, Life

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS, which Python has from 3.12 on


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    num_bytes: int
    """What the disk holds, or a file may hold."""
    exit_code: int
    """0: there was room enough."""
    message: str
    whole: str | None
    """The newest checkpoint that verified afterwards."""
    names: tuple[str, ...]
    """In the folder of checkpoints."""


def run_on_tmpfs(folder: Path, num_bytes: int, reference: Reference) -> Outcome:
    """Run on a tmpfs of so many bytes until it is full, give it more room, and go on. Nothing stays mounted.

    Raises:
        AssertionError: a checkpoint was harmed, or the run that went on is not that with room enough.
        PermissionError: this process may not mount.
    """
    return run_ranks(partial(_run_on_tmpfs, folder, num_bytes, reference), 1, timeout_seconds=300, group=False)[0]


def require_mount() -> None:
    """Skip the test where nothing can be mounted."""
    try:
        run_ranks(_leave_mounts, 1, group=False)
    except RankFailed as error:
        pytest.skip(f"mounts of its own are not allowed: {str(error).strip().splitlines()[-1]}")


def _run_on_tmpfs(folder: Path, num_bytes: int, reference: Reference) -> Outcome:
    # Its thread does not live on in the ranks that are forked here, and they would wait for it.
    faulthandler.cancel_dump_traceback_later()
    _leave_mounts()
    disk = folder / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={num_bytes}", "small", disk)
    outcome = _run(folder, disk / "run", num_bytes, main.__wrapped__)
    _mount("-o", f"remount,size={100 * num_bytes}", disk)
    _go_on(folder, disk / "run", reference)
    return outcome


def _leave_mounts() -> None:
    """What this process mounts from here on, others do not see, and it is gone with the process."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    _mount("--make-rprivate", "/")


def _mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise PermissionError(done.stderr.strip())


def run_with_short_files(folder: Path, num_bytes: int, reference: Reference) -> Outcome:
    """Let no file grow beyond so many bytes from the second save on, then go on without that limit."""
    save = Trainer._save_checkpoint

    def limit_and_save(trainer: Trainer, *more: Any) -> None:
        if trainer.state.global_step == STEP:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        save(trainer, *more)

    def run(config: RunConfig) -> None:
        Trainer._save_checkpoint = limit_and_save
        main.__wrapped__(config)

    outcome = _run(folder, folder / "run", num_bytes, run)
    _go_on(folder, folder / "run", reference)
    return outcome


def _run(folder: Path, run_dir: Path, num_bytes: int, run: Callable[[RunConfig], object]) -> Outcome:
    told = folder / "error"

    def run_and_tell(config: RunConfig) -> None:
        try:
            run(config)
        except HfdistError as error:
            told.write_text(f"{error.exit_code} {error}")
            raise

    life = Life(make_small_config(run_dir), 1, folder / "log", run_and_tell)
    life.end(LONGEST_SECONDS)
    assert life.has_finished or told.exists(), f"not told legibly:\n{life.log.read_text()}"
    code, _, message = told.read_text().partition(" ") if told.exists() else ("0", "", "")
    checkpoints = run_dir / "checkpoints"
    names = tuple(sorted(path.name for path in checkpoints.iterdir())) if checkpoints.is_dir() else ()
    return Outcome(num_bytes, int(code), message, newest_whole(run_dir), names)


def _go_on(folder: Path, run_dir: Path, reference: Reference) -> None:
    Life(make_small_config(run_dir), 1, folder / "log-again").join()
    assert read_run(run_dir) == reference
