"""A command with a folder, environment and exit code of its own, in a fork of a process that has imported all.

For tests of what commands do one after the other. That a fresh process does the same, and what it imports, is tested
in test_command_line.py and test_launch.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from subprocess import CompletedProcess

import torch

from hfdist.testing import forget_parent
from tests.e2e.test_command_line import RECIPE
from tests.imports import import_all


def start_forked(
    run: Callable[..., object], *arguments: object, cwd: Path, said: tuple[Path, Path], **environment: str
) -> ForkProcess:
    """Call `run(*arguments)` in a process that leads a session; `said`: its standard output and error (may be one)."""
    import_all()
    process = multiprocessing.get_context("fork").Process(target=_call, args=(run, arguments, cwd, said, environment))
    process.start()
    return process


def _call(
    run: Callable[..., object], arguments: tuple[object, ...], cwd: Path, said: tuple[Path, Path], environment: dict
) -> None:
    os.setsid()
    gc.freeze()
    forget_parent()
    torch.set_num_threads(1)
    for descriptor, (name, path) in enumerate(zip(("stdout", "stderr"), said, strict=True), start=1):
        file = path.open("a", buffering=1)
        os.dup2(file.fileno(), descriptor)
        setattr(sys, name, file)
    os.chdir(cwd)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    run(*arguments)


def run_script(script: Path, *arguments: object) -> None:
    """As `python script` does: the process ends with the code of the SystemExit that a recipe raises."""
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(str(script), run_name="__main__")


def end(process: ForkProcess, timeout_seconds: float = 120) -> int | None:
    """Wait for the end, end what the process has started, and give the exit code. None: it took longer."""
    process.join(timeout_seconds)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return code


def run_forked(
    *arguments: object, cwd: Path, script: Path = RECIPE, timeout_seconds: float = 120, **environment: str
) -> CompletedProcess[str]:
    """Run a recipe to its end.

    Raises:
        AssertionError: it takes longer than `timeout_seconds`.
    """
    said = (cwd / ".stdout", cwd / ".stderr")
    code = end(start_forked(run_script, script, *arguments, cwd=cwd, said=said, **environment), timeout_seconds)
    texts = [path.read_text() for path in said]
    for path in said:
        path.unlink()
    assert code is not None, texts
    return CompletedProcess([script, *arguments], code, *texts)
