"""`Uploader`: a thread that sends checkpoints to a mirror while training goes on; only the run's end waits for it."""

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
    """The report of an upload that has ended, well or not."""

    step: int
    """Step of the checkpoint."""
    sent: UploadProgress
    """How far the upload has come."""
    seconds: float
    """Seconds that the upload has taken."""
    newest_step: int | None
    """Step of the newest checkpoint in the mirror; None: it has none."""
    num_failures: int
    """Number of uploads of this process that have failed so far, this one included."""
    has_failed: bool
    """Whether this upload has failed. It has, too, if the checkpoint is sent and older ones cannot be removed."""


class Uploader:
    """Uploads one checkpoint at a time. One other may wait: a newer one takes the place of the one that waits.

    A failure ends an upload, never the training: there is a warning, and the next upload sends what is missing.

    Args:
        mirror: the mirror of the run; from the first `put` on only the thread uses it.
        keep: which checkpoints stay in the mirror.
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
        """How far the present upload has come."""
        self._changed = threading.Condition()
        """Guards the three fields that follow, and tells of their changes."""
        self._next: Path | None = None
        """The checkpoint that waits."""
        self._now: Path | None = None
        """The checkpoint that is being sent."""
        self._is_over = False
        """Whether no other upload may begin."""
        self._failed: Path | None = None
        """The checkpoint that the last upload has not sent whole; None: that upload has ended well."""
        self._num_failures = 0
        self._uploads: deque[Upload] = deque()
        # A daemon: a process may end without waiting for it, as the mirror is whole at every moment.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def put(self, path: Path) -> None:
        """Let a checkpoint be uploaded next, and start the thread if this is the first; after `end` do nothing."""
        with self._changed:
            if self._is_over:
                return
            self._next = path
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    @property
    def held(self) -> frozenset[str]:
        """Names of the checkpoints that are being sent or wait for it, and so must not be removed."""
        with self._changed:
            return frozenset(path.name for path in (self._now, self._next) if path is not None)

    def take_uploads(self) -> list[Upload]:
        """Give the uploads that have ended since the last call, the oldest first."""
        # The thread may add one meanwhile.
        return [self._uploads.popleft() for _ in range(len(self._uploads))]

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to upload, at most for so many seconds, and say whether nothing is left."""
        with self._changed:
            return self._changed.wait_for(lambda: self._now is None and self._next is None, seconds)

    def end(self) -> None:
        """Begin no other upload, and give the present one up when it next tells its progress."""
        with self._changed:
            self._is_over, self._next = True, None
            self._changed.notify_all()

    def _run(self) -> None:
        """Send checkpoint after checkpoint, in the thread."""
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
                # What the failed upload of another checkpoint has left may fill a store that has little room.
                self.mirror.prune(keep)
            self._failed = path
            self.progress = self.mirror.send(path, self._tell, self._list_beside())
            self.newest_step, self._failed = step_of(path.name), None
            self.mirror.prune(keep)
        except _OverError:
            return
        except Exception as caught:
            # Of any kind, as the libraries of stores raise what they like.
            error = caught
            self._num_failures += 1
        seconds, step = time.monotonic() - begin, step_of(path.name)
        if error is not None:
            what = "cannot be tidied" if self._failed is None else f"has not got {path.name}"
            said = error if isinstance(error, HfdistError) else named_line(error)
            logger.warning("the mirror %s: %s", what, said)
        upload = Upload(
            step, self.progress, seconds, self.newest_step, self._num_failures, has_failed=error is not None
        )
        self._uploads.append(upload)

    def _tell(self, sent: UploadProgress) -> None:
        """Note how far the upload has come; _OverError: it is to be given up."""
        self.progress = sent
        if self._is_over:
            raise _OverError


class _OverError(Exception):
    """The upload is given up, as the run ends."""
