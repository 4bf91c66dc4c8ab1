"""A command of the user's that gets each alert, beside the training: for a webhook, a mail or a pager."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import threading
from collections.abc import Mapping

from hfdist.errors import printable

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 30.0
"""Then it is killed."""


class AlertCommand:
    """Starts the command for each alert, without a shell; what fails is a warning.

    Args:
        command: split into words as a shell does.
    """

    def __init__(self, command: str) -> None:
        program, *arguments = shlex.split(command)
        self._words = [os.path.expanduser(program), *arguments]
        self._threads: list[threading.Thread] = []

    def start(self, alert: Mapping[str, object]) -> None:
        """Start the command, with an alert as JSON on its standard input, and do not wait for it."""
        text = json.dumps(alert) + "\n"
        # A daemon: a process that ends does not wait for it.
        thread = threading.Thread(target=self._run, args=(text,), name="alert-command", daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def wait(self) -> None:
        """Wait for what still runs, at most as long as it may take."""
        for thread in self._threads:
            thread.join(_LONGEST_SECONDS + 1)

    def _run(self, text: str) -> None:
        try:
            ended = subprocess.run(
                self._words,
                input=text,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=_LONGEST_SECONDS,
                check=False,
            )
        except OSError as error:
            logger.warning("report.alert_command cannot be started: %s", error.strerror)
            return
        except subprocess.TimeoutExpired:
            logger.warning("report.alert_command took more than %g s, and was killed", _LONGEST_SECONDS)
            return
        if ended.returncode != 0:
            said = printable(ended.stderr.strip(), 200)
            logger.warning("report.alert_command has ended with exit code %d: %s", ended.returncode, said)
