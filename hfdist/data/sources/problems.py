"""What happens to files that cannot be read: stop, or leave them out and say so."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hfdist.config.data import BadRows
from hfdist.data.sources.base import ContentError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadFile:
    """A file that was left out."""

    url: str
    """Without user, password or signed query."""
    reason: str


class Problems:
    """Applies `data.on_bad_rows` to files, and keeps the list of those that were left out."""

    def __init__(self, policy: BadRows) -> None:
        self.bad_files: list[BadFile] = []
        self._policy = policy

    def leave_out(self, url: str, error: ContentError) -> None:
        """Count a bad file and warn of it.

        Raises:
            ContentError: `error` itself, where the policy is to stop.
        """
        if self._policy is BadRows.error:
            skip = "data.on_bad_rows=skip leaves the file out"
            error.hint = f"{error.hint}, or {skip}" if error.hint else skip
            raise error
        self.bad_files.append(BadFile(url, error.what))
        _log.warning("%s is left out: %s", url, error.what)
