"""Python's collector of cycles, paused where many small values are made: it would look at each, and none is free."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector in this context; it goes on after that, unless it was off already."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import at four fifths of the cost: the garbage collector does not run meanwhile, nor look at these objects later.

    They stay as long as the process, and torch and transformers make millions of them.
    """
    is_first = "transformers" not in sys.modules
    with collector_paused():
        try:
            yield
        finally:
            # Later there may be garbage that was not collected yet, such as a model, and it would stay.
            if is_first:
                gc.freeze()
