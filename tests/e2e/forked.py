"""A recipe as a command of its own folder, environment and exit code, in a fork of a process that has imported all.

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
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import torch

from hfdist.testing import forget_parent
from tests.e2e.test_command_line import RECIPE
from tests.imports import import_all


def run_forked(
    *arguments: str, cwd: Path, script: Path = RECIPE, timeout_seconds: float = 120, **environment: str
) -> CompletedProcess[str]:
    """Run a recipe to its end.

    Raises:
        AssertionError: it takes longer than `timeout_seconds`.
    """
    import_all()
    said = [cwd / ".stdout", cwd / ".stderr"]
    process = multiprocessing.get_context("fork").Process(
        target=_main, args=(script, arguments, cwd, environment, said)
    )
    process.start()
    process.join(timeout_seconds)
    ended = process.exitcode
    # And what it has started: it leads a session.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    texts = [path.read_text() for path in said]
    for path in said:
        path.unlink()
    assert ended is not None, texts
    return CompletedProcess([script, *arguments], ended, *texts)


def _main(script: Path, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], said: list[Path]) -> None:
    os.setsid()
    gc.freeze()
    forget_parent()
    torch.set_num_threads(1)
    for descriptor, path in enumerate(said, start=1):
        file = path.open("w", buffering=1)
        os.dup2(file.fileno(), descriptor)
        setattr(sys, ("stdout", "stderr")[descriptor - 1], file)
    os.chdir(cwd)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    # The process ends with the code of the SystemExit that the recipe raises.
    runpy.run_path(str(script), run_name="__main__")
