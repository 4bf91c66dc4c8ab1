"""The user's own command that gets each alert, for a webhook, a mail or a pager. The training does not wait for it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from typing import BinaryIO

from hfdist.errors import printable

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 30.0
"""Seconds after which a command that still runs is killed."""


class AlertCommand:
    """A command that is started for each alert, without a shell. If it fails, a warning is logged.

        start --> a daemon thread for each alert --> the command: JSON on its stdin, killed after 30 seconds

    Args:
        command: the command line, which is split into words as a shell does.
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
        try:
            thread.start()
        except RuntimeError as error:
            # At a limit of threads: the training goes on.
            logger.warning("report.alert_command cannot be started: %s", error)
            return
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def wait(self) -> None:
        """Wait until all commands have ended, or were killed."""
        for thread in self._threads:
            thread.join(_LONGEST_SECONDS + 1)

    def _run(self, text: str) -> None:
        """Run the command in its thread, and warn if it cannot be started: no error may reach the training."""
        try:
            # Its errors go to a file, and not to a pipe: a child that the command leaves running may hold that open.
            with tempfile.TemporaryFile() as errors:
                self._call(text, errors)
        except (OSError, ValueError) as error:
            logger.warning("report.alert_command cannot be started: %s", getattr(error, "strerror", None) or error)

    def _call(self, text: str, errors: BinaryIO) -> None:
        """Run the command to its end, and warn if it fails or takes too long; `errors` takes its stderr."""
        process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True, process_group=0
        )
        try:
            process.communicate(text, _LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            # The whole group is killed: a command may have children.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            logger.warning("report.alert_command took more than %g s, and was killed", _LONGEST_SECONDS)
            return
        if process.returncode != 0:
            errors.seek(0)
            said = printable(errors.read(1000).decode(errors="replace").strip(), 200)
            logger.warning("report.alert_command has ended with exit code %d: %s", process.returncode, said)
