"""Saves that a disk fails: strace injects an error into the n-th system call of a kind, or there is too little room."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest

from hfdist.config.run import RunConfig
from hfdist.errors import CheckpointError, HfdistError, ResourceError
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.trainer import Trainer
from proofs.faults import SAVE_EVERY, Reference, make_config, read_run
from proofs.kills import newest_whole
from recipes.pretrain import main
from tests.debian import why_missing
from tests.distributed.processes import LONGEST_SECONDS, Life

STEP = 2 * SAVE_EVERY
"""Of the save that fails: there is a good checkpoint before."""
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS, which Python has from 3.12 on
OLDER = f"checkpoints/step-{SAVE_EVERY:08d}"
"""Which is removed once the save is done."""
ERRORS = {
    "pwrite64": ("ENOSPC", "EIO"),
    "write": ("ENOSPC", "EIO"),
    "fallocate": ("ENOSPC", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "openat": ("ENOSPC", "EIO"),
    "mkdir": ("ENOSPC", "EIO"),
    "rename": ("EIO", "ENOSPC"),
    "unlinkat": ("EIO",),
    "rmdir": ("EIO",),
}
"""By call: one after the other, in turn."""


@dataclass(frozen=True)
class Fault:
    """What fails."""

    call: str
    error: str
    when: int
    """Counted from 1, since the save began."""


@dataclass(frozen=True)
class Outcome:
    """What became of the run."""

    exit_code: int
    """Of the run; 0: it went on; -1: it ended without a word."""
    message: str
    whole: str | None
    """The newest checkpoint that verified afterwards."""
    names: tuple[str, ...]
    """In the folder of checkpoints."""
    path: str = ""
    """Where a fault struck."""


@cache
def why_no_strace() -> str | None:
    """Install strace if it is missing, and see whether it may attach. Gives the reason if not."""
    if (reason := why_missing("strace")) is not None:
        return reason
    with subprocess.Popen(["sleep", "10"]) as sleeper:
        tracer = subprocess.run(
            ["timeout", "--signal=INT", "1", "strace", "-p", str(sleeper.pid)], capture_output=True, text=True
        )
        sleeper.kill()
    return None if "attached" in tracer.stderr else f"strace may not attach: {tracer.stderr.strip()}"


def require_strace() -> None:
    """Skip the test where strace cannot be used."""
    if reason := why_no_strace():
        pytest.skip(reason)


def inject(fault: Fault, trace: Path) -> None:
    """Let a system call of this process fail from now on."""
    injection = f"inject={fault.call}:error={fault.error}:when={fault.when}"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={fault.call}", "-e", injection]
    tracer = subprocess.Popen([*command, "-p", str(os.getpid())], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    assert "attached" in (said := tracer.stderr.readline()), said


def make_small_config(run_dir: Path) -> RunConfig:
    """A run whose second save is its last, with one block, so that it makes few calls.

    It saves in its main thread: strace counts the calls of each thread by themselves.
    """
    small = ("model.config.num_hidden_layers=1", "checkpoint.background=false")
    return make_config(run_dir, "single", f"train.max_steps={STEP}", *small)


def run_fault(folder: Path, fault: Fault, reference: Reference) -> Outcome | None:
    """Let a call fail while a run saves, and the run go on without faults. None: the save has fewer such calls.

    Raises:
        AssertionError: a checkpoint was harmed, the failure went unnoticed or is not told legibly, or the run that
            went on is not the one without faults.
    """
    folder.mkdir()
    run_dir, trace = folder / "run", folder / "trace"
    outcome = _run(folder, run_dir, partial(_run_from_last_save, action=partial(inject, fault, trace)))
    injected = re.search(r"^.*\(INJECTED\).*$", trace.read_text(), flags=re.MULTILINE)
    if injected is None:
        return None
    found = re.search(r'[<"](/[^>"]*)[>"]', re.sub("AT_FDCWD<[^>]*>", "", injected[0]))
    path = re.sub(r"\.tmp-[0-9a-f]+", ".tmp", found[1]) if found else "a pipe"
    if path.startswith(f"{run_dir}/"):
        path = path.removeprefix(f"{run_dir}/")
        assert not _is_wrong(fault, path, outcome.exit_code), f"{outcome}: {injected[0]}"
    assert outcome.whole is not None
    assert not [name for name in outcome.names if ".bad-" in name]
    _go_on(folder, run_dir, reference)
    # The older one may stay: where it could not be removed, no save came after that would.
    names = [f"checkpoints/{name}" for name in os.listdir(run_dir / "checkpoints")]
    assert not [name for name in names if not name.startswith(OLDER) and name != f"checkpoints/step-{STEP:08d}"]
    return replace(outcome, path=path)


def _is_wrong(fault: Fault, path: str, exit_code: int) -> bool:
    if path.startswith(OLDER):
        # What cannot be removed is told, and harms nothing.
        return exit_code != 0
    if exit_code == 0:
        # A folder may be there already, a file may be one that is looked for in vain anyway, and a card is no model.
        # So is the state of the run between two steps.
        is_harmless = path == "model/README.md" or path.startswith("run.")
        return fault.call not in ("mkdir", "openat") and not is_harmless
    is_resource = fault.error == "ENOSPC" or path in ("metrics.jsonl", "events.jsonl", "ranks.jsonl")
    return exit_code != (ResourceError if is_resource else CheckpointError).exit_code


def _run_from_last_save(config: RunConfig, *, action: Callable[[], object]) -> None:
    """What the process runs: something is done to it before its last save."""
    save = Trainer._save_checkpoint

    def act_and_save(trainer: Trainer, *more: object) -> None:
        if trainer.state.global_step == STEP:
            action()
        save(trainer, *more)

    Trainer._save_checkpoint = act_and_save
    main.__wrapped__(config)


def every_fault(call: str) -> Iterator[Fault]:
    """Of every call of a kind, in order, without end."""
    when, errors = 0, ERRORS[call]
    while True:
        yield Fault(call, errors[when % len(errors)], when + 1)
        when += 1


# ---- too little room ----


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
    outcome = _run(folder, disk / "run", main.__wrapped__)
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
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    outcome = _run(folder, folder / "run", partial(_run_from_last_save, action=limit))
    _go_on(folder, folder / "run", reference)
    return outcome


def _run(folder: Path, run_dir: Path, run: Callable[[RunConfig], object]) -> Outcome:
    told = folder / "error"

    def run_and_tell(config: RunConfig) -> None:
        try:
            run(config)
        except HfdistError as error:
            told.write_text(f"{error.exit_code} {error}")
            raise

    life = Life(make_small_config(run_dir), 1, folder / "log", run_and_tell)
    life.end(LONGEST_SECONDS)
    if told.exists():
        code, _, message = told.read_text().partition(" ")
    else:
        code, message = (0, "") if life.has_finished else (-1, life.log.read_text())
    checkpoints = run_dir / "checkpoints"
    names = tuple(sorted(path.name for path in checkpoints.iterdir())) if checkpoints.is_dir() else ()
    return Outcome(int(code), message, newest_whole(run_dir), names)


def _go_on(folder: Path, run_dir: Path, reference: Reference) -> None:
    Life(make_small_config(run_dir), 1, folder / "log-again").join()
    assert read_run(run_dir) == reference
