"""Python processes that hfdist starts: none of them looks for modules in the folder in which the user works."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_SAFE_PATH = "PYTHONSAFEPATH"


def python(*arguments: str) -> list[str]:
    """Give a command of this Python: `-P` keeps the working folder, or that of a script, out of its module path."""
    return [sys.executable, "-P", *arguments]


def module(name: str, *arguments: str) -> list[str]:
    """Give the command that runs a module by its name, as `python -m` does."""
    return python("-m", name, *arguments)


@contextlib.contextmanager
def safe_path() -> Iterator[str | None]:
    """Keep the working folder out of what libraries start meanwhile; gives what `restore_path` takes in those.

    multiprocessing starts its processes by `python -c`, with the flags of this one, and looks for its own modules in
    the working folder first.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield before
    finally:
        restore_path(before)


def restore_path(before: str | None) -> None:
    """Give the variable its value again: what the user's own commands start has the user's own settings."""
    if before is None:
        os.environ.pop(_SAFE_PATH, None)
    else:
        os.environ[_SAFE_PATH] = before
