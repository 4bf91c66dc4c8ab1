"""Starts readers in processes of their own (`benchmarks.data.served`), and lets each read for a moment at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.data.rounds import end_session, environment
from benchmarks.data.served import ANSWER
from benchmarks.overlay import UnavailableError
from benchmarks.table import last_said

_ROOT = Path(__file__).resolve().parents[2]
_READY_SECONDS, _TURN_SECONDS = 240, 60


class Reader:
    """A process that reads when it is asked to; it starts at once, and `wait` waits until it can.

    Args:
        loader: MODULE:CLASS, as in `benchmarks.data.contenders`.
        options: of the class.
        folder: of the work.
        log: a file for what the process says.
        variables: its environment, beside this process's.
    """

    def __init__(
        self, loader: str, options: Mapping[str, Any], folder: Path, log: Path, variables: Mapping[str, str]
    ) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.data.served", loader, json.dumps(options), str(folder)],
                cwd=_ROOT,
                env={**os.environ, **environment(folder), **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # So that its own workers can be ended with it.
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until the first batches are read.

        Raises:
            UnavailableError: it ends before, or takes too long; what it said last is the reason.
        """
        self._answer(_READY_SECONDS)

    def read(self, cpu_seconds: float) -> float:
        """Tokens a CPU second, over about so many of them.

        Raises:
            UnavailableError: as `wait`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{cpu_seconds}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise UnavailableError(self._said_last()) from error
        return float(self._answer(_TURN_SECONDS))

    def end(self) -> None:
        """End it and its workers at once: by itself `datasets` would sleep for 5 s first."""
        end_session(self._process.pid)
        # Waits, and closes what led to it.
        with suppress(BrokenPipeError):
            self._process.communicate()

    def _answer(self, most_seconds: float) -> str:
        assert self._process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            # Its end ends the lines below.
            end_session(self._process.pid)

        timer = threading.Timer(most_seconds, give_up)
        timer.start()
        try:
            for line in self._process.stdout:
                # Libraries write to the same place.
                if line.startswith(ANSWER):
                    return line.removeprefix(ANSWER).strip()
        finally:
            timer.cancel()
        raise UnavailableError(f"no answer after {most_seconds} s" if is_late.is_set() else self._said_last())

    def _said_last(self) -> str:
        return last_said(self._log.read_text()) or "it ended, and said nothing"
