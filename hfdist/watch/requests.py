"""Requests of `explain-hang` to the ranks of a run: a file in the folder of the watch, which rank 0 finds. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hfdist.atomic_write import write_atomically
from hfdist.errors import ConfigError
from hfdist.records import RunFolder

ASKED = re.compile(r"asked-\d{8}-\d{6}")
"""Names of the folders into which the ranks write their answers."""
_REQUEST = "request"
_LONGEST = 100
"""Bytes that are read of a request."""


def request(run_dir: Path, name: str) -> Path:
    """Ask the ranks of a run to write what they are doing, and give the folder of their answers.

    Args:
        run_dir: the run's folder.
        name: the name of the folder of the answers, such as `asked-20260102-030405`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = RunFolder(run_dir).watch
    try:
        folder.mkdir(exist_ok=True)
        write_atomically(folder / _REQUEST, json.dumps(name).encode(), is_durable=False)
    except OSError as error:
        what, found = "the ranks cannot be asked", error.strerror
        raise ConfigError(what, where=str(folder), found=found, hint="the user of the run may write there") from error
    return folder / name


def take_request(run_dir: Path) -> str | None:
    """Find a request, and remove it; None: there is none, or it names no folder of answers."""
    path = RunFolder(run_dir).watch / _REQUEST
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST)
        path.unlink()
        name = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    return name if isinstance(name, str) and ASKED.fullmatch(name) else None


def withdraw(run_dir: Path) -> None:
    """Remove a request that rank 0 has not found."""
    (RunFolder(run_dir).watch / _REQUEST).unlink(missing_ok=True)
