"""Sends that are under way: each is held, with its tensor, until it is done."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from queue import Queue

import torch.distributed as dist


class Sends:
    """The sends of one rank.

    Args:
        tells: whether the backend's work says that it is done. That of gloo does so only to who waits for it, so a
            thread waits.
    """

    def __init__(self, *, tells: bool) -> None:
        self._under_way: deque[dist.Work] = deque()
        self._waiting: Queue[dist.Work | None] | None = None
        self._errors: list[Exception] = []
        if not tells:
            self._waiting = Queue()
            # A daemon: a process whose peer is gone must be able to end.
            thread = threading.Thread(target=_wait_for_each, args=(self._waiting, self._errors), daemon=True)
            thread.start()
            weakref.finalize(self, self._waiting.put, None)

    def add(self, work: dist.Work) -> None:
        """Hold one until it is done; let go of those that are done."""
        if self._waiting is not None:
            self._waiting.put(work)
            return
        self._under_way.append(work)
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()

    def wait(self) -> None:
        """Wait for all; raise what one of them has raised."""
        if self._waiting is not None:
            self._waiting.join()
            if self._errors:
                raise self._errors.pop()
        while self._under_way:
            self._under_way.popleft().wait()


def _wait_for_each(works: Queue[dist.Work | None], errors: list[Exception]) -> None:
    while (work := works.get()) is not None:
        try:
            work.wait()
        except Exception as error:  # of the backend: any
            errors.append(error)
        finally:
            del work
            works.task_done()
