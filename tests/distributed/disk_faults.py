"""System calls of a real save that fail: strace injects an error into the n-th of a kind, in a real process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

from hfdist.config.run import RunConfig
from hfdist.errors import CheckpointError, HfdistError, ResourceError
from hfdist.trainer.reporting.callbacks import METRICS
from hfdist.trainer.trainer import Trainer
from recipes.pretrain import main
from tests.distributed.faults import SAVE_EVERY, Reference, make_config, read_run
from tests.distributed.kills import newest_whole
from tests.distributed.processes import LONGEST_SECONDS, Life

STEP = 2 * SAVE_EVERY
"""Of the save that fails: there is a good checkpoint before."""
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

    def __str__(self) -> str:
        return f"{self.call} {self.when}: {self.error}"


@dataclass(frozen=True)
class Outcome:
    """What became of the run."""

    fault: Fault
    path: str
    """Where it struck."""
    exit_code: int
    """Of the run; 0: it went on."""
    message: str
    whole: int
    """Step of the newest checkpoint that verified afterwards."""

    def __str__(self) -> str:
        said = "the run went on" if self.exit_code == 0 else f"exit {self.exit_code}, {self.message.splitlines()[0]}"
        return f"{self.fault} at {self.path}: {said}; step {self.whole} whole"


@cache
def why_no_strace() -> str | None:
    """Install strace if it is missing, and see whether it may attach. Gives the reason if not."""
    if shutil.which("strace") is None:
        # A Debian without lists of packages has to fetch them first.
        for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "strace"]):
            if shutil.which("apt-get") is None or subprocess.run(command, capture_output=True).returncode != 0:
                return "strace is missing, and cannot be installed"
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
    config = make_small_config(run_dir)
    life = Life(config, 1, folder / "log", partial(_run_with_fault, fault=fault, folder=folder))
    life.end(LONGEST_SECONDS)
    said = life.log.read_text()
    injected = re.search(r"^.*\(INJECTED\).*$", trace.read_text(), flags=re.MULTILINE)
    if injected is None:
        return None
    found = re.search(r'[<"](/[^>"]*)[>"]', re.sub("AT_FDCWD<[^>]*>", "", injected[0]))
    path = re.sub(r"\.tmp-[0-9a-f]+", ".tmp", found[1]) if found else "a pipe"
    exit_code, message = 0, ""
    if path.startswith(f"{run_dir}/"):
        path = path.removeprefix(f"{run_dir}/")
        if not life.has_finished:
            exit_code, message = _read_error(folder / "error", said, injected[0])
        assert not _is_wrong(fault, path, exit_code), f"exit {exit_code}: {injected[0]}\n{said}"
    checkpoints = run_dir / "checkpoints"
    whole = newest_whole(run_dir)
    assert whole is not None
    assert not list(checkpoints.glob("*.bad-*"))
    Life(config, 1, folder / "log-again").join()
    assert read_run(run_dir) == reference
    # The older one may stay: where it could not be removed, no save came after that would.
    names = [f"checkpoints/{name}" for name in os.listdir(checkpoints)]
    assert not [name for name in names if not name.startswith(OLDER) and name != f"checkpoints/step-{STEP:08d}"]
    return Outcome(fault, path, exit_code, message, int(whole.removeprefix("step-")))


def _is_wrong(fault: Fault, path: str, exit_code: int) -> bool:
    if path.startswith(OLDER):
        # What cannot be removed is told, and harms nothing.
        return exit_code != 0
    if exit_code == 0:
        # A folder may be there already, a file may be one that is looked for in vain anyway, and a card is no model.
        return fault.call not in ("mkdir", "openat") and path != "model/README.md"
    is_resource = fault.error == "ENOSPC" or path == METRICS
    return exit_code != (ResourceError if is_resource else CheckpointError).exit_code


def _read_error(error: Path, said: str, injected: str) -> tuple[int, str]:
    assert error.exists(), f"not told legibly: {injected}\n{said}"
    code, _, message = error.read_text().partition(" ")
    return int(code), message


def _run_with_fault(config: RunConfig, *, fault: Fault, folder: Path) -> None:
    """What the process runs that has the fault."""
    save = Trainer._save_checkpoint

    def save_with_fault(trainer: Trainer, *more: object) -> None:
        if trainer.state.global_step == STEP:
            inject(fault, folder / "trace")
        save(trainer, *more)

    Trainer._save_checkpoint = save_with_fault
    try:
        main.__wrapped__(config)
    except HfdistError as error:
        (folder / "error").write_text(f"{error.exit_code} {error}")
        raise


def every_fault(call: str) -> Iterator[Fault]:
    """Of every call of a kind, in order, without end."""
    when, errors = 0, ERRORS[call]
    while True:
        yield Fault(call, errors[when % len(errors)], when + 1)
        when += 1
