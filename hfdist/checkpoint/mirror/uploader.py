"""Sends checkpoints to a mirror beside the training, in a thread: nobody waits for a bucket but the end of a run."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hfdist.checkpoint.folder import Keep, step_of
from hfdist.checkpoint.mirror.mirror import Mirror, UploadProgress
from hfdist.errors import HfdistError, named_line

logger = logging.getLogger(__name__)


class Upload(NamedTuple):
    """An upload that has ended, well or not."""

    step: int
    sent: UploadProgress
    seconds: float
    newest_step: int | None
    """Step of the newest checkpoint in the mirror; None: it has none."""
    num_failures: int
    """Uploads of this process that have failed, up to this one."""
    has_failed: bool
    """Whether this one has; also where it is sent and older ones cannot be removed."""


class Uploader:
    """Uploads one checkpoint at a time, and the newest next: what comes meanwhile takes the place of what waits.

    A failure ends an upload, never the training: there is a warning, and the next upload sends what is missing.

    Args:
        mirror: where to; the thread has it alone from the first `put` on.
        keep: which checkpoints stay there.
        newest_step: step of the newest checkpoint that is there; None: there is none.
        list_beside: gives the files that are sent beside a checkpoint, by name; called in the thread.
    """

    def __init__(
        self,
        mirror: Mirror,
        keep: Keep,
        newest_step: int | None = None,
        list_beside: Callable[[], Mapping[str, Path]] = dict,
    ) -> None:
        self.mirror, self._keep, self.newest_step = mirror, keep, newest_step
        self._list_beside = list_beside
        self.progress = UploadProgress(0, 0, 0)
        """How far the upload is that goes on."""
        self._changed = threading.Condition()
        self._next: Path | None = None
        self._now: Path | None = None
        self._is_over = False
        self._failed: Path | None = None
        """The checkpoint that the last upload has not sent whole; None: it has."""
        self._num_failures = 0
        self._uploads: deque[Upload] = deque()
        # A daemon: a process that ends takes it along at any moment, and the mirror is whole at every moment.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def put(self, path: Path) -> None:
        """Let a checkpoint be uploaded."""
        with self._changed:
            if self._is_over:
                return
            self._next = path
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    @property
    def held(self) -> frozenset[str]:
        """Names of the checkpoints that are being read, or about to be."""
        with self._changed:
            return frozenset(path.name for path in (self._now, self._next) if path is not None)

    def take_uploads(self) -> list[Upload]:
        """Give the uploads that have ended since the last call, the oldest first."""
        # The thread may add one meanwhile.
        return [self._uploads.popleft() for _ in range(len(self._uploads))]

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to upload, at most so long; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._now is None and self._next is None, seconds)

    def end(self) -> None:
        """Begin no other upload, and give the present one up at its next step."""
        with self._changed:
            self._is_over, self._next = True, None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._now = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_over or self._next is not None)
                path = self._now = self._next
                self._next, self.progress = None, UploadProgress(0, 0, 0)
            if path is None:
                return
            self._upload(path)

    def _upload(self, path: Path) -> None:
        begin, error = time.monotonic(), None
        keep = replace(self._keep, named=frozenset([path.name]))
        try:
            if self._failed not in (None, path):
                # What it has left would fill a store that has little room; of this checkpoint it is needed.
                self.mirror.prune(keep)
            self._failed = path
            self.progress = self.mirror.send(path, self._tell, self._list_beside())
            self.newest_step, self._failed = step_of(path.name), None
            self.mirror.prune(keep)
        except _OverError:
            return
        except Exception as caught:
            # Whatever the library of a store raises.
            error = caught
            self._num_failures += 1
        seconds, step = time.monotonic() - begin, step_of(path.name)
        if error is not None:
            what = "cannot be tidied" if self._failed is None else f"has not got {path.name}"
            said = error if isinstance(error, HfdistError) else named_line(error)
            logger.warning("the mirror %s: %s", what, said)
        self._uploads.append(
            Upload(step, self.progress, seconds, self.newest_step, self._num_failures, error is not None)
        )

    def _tell(self, sent: UploadProgress) -> None:
        self.progress = sent
        if self._is_over:
            raise _OverError


class _OverError(Exception):
    """Nobody waits for the upload any more."""
