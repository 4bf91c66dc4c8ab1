"""What a start is doing, said on rank 0 once it takes seconds, so that no ten seconds pass without a line."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

_FIRST_SECONDS, _NEXT_SECONDS = 3.0, 8.0
T = TypeVar("T")

_is_on = False
_progress = ""


def switch_reports(is_on: bool) -> None:
    """Set whether this process reports what its start is doing."""
    global _is_on
    _is_on = is_on


def counted(items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Give the items on; meanwhile the lines of `reporting` say how many of all there were, such as `3 of 12 files`."""
    global _progress
    try:
        for number, item in enumerate(items):
            _progress = f", {number:,} of {total:,} {unit}"
            yield item
    finally:
        _progress = ""


@contextmanager
def reporting(text: str) -> Iterator[threading.Event]:
    """Print `text` and its seconds on standard error, again and again, until the block or the given event ends it."""
    ended = threading.Event()
    # Without a standard error, the number 2 may be another file.
    if _is_on and sys.stderr is not None:
        threading.Thread(target=_say, args=(text, ended), name="hfdist-startup", daemon=True).start()
    try:
        yield ended
    finally:
        ended.set()


def _say(text: str, ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_FIRST_SECONDS):
        return
    while True:
        # No lock of Python's streams: another thread may fork meanwhile. Whoever reads may be gone.
        with suppress(OSError):
            os.write(2, f"{text}: {time.monotonic() - began:.0f} s{_progress}\n".encode())
        if ended.wait(_NEXT_SECONDS):
            return
