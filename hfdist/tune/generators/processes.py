"""The generators' processes on the machine of rank 0, which starts them, again when they die, and ends them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hfdist.errors import ConfigError, PeerError, printable
from hfdist.topology import without_launcher

MOST_RESTARTS = 3
"""Most restarts of a generator that gives no answers between them: what has killed it would kill it again."""
_LAST_BYTES = 4000
"""The end of a log that is looked at for the last message."""


@dataclass
class _Generator:
    """One of the processes, with what is known of its earlier starts."""

    log: Path
    num_starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)
    """Exit codes of the starts since it has last given answers; below zero: the signal that has killed it."""


class Processes:
    """Processes that generate answers; they begin at once.

    Args:
        count: number of generators.
        command: command of a generator; its number, its name for `connect`, and the id of this process follow.
        logs: folder for the output of the generators.
        are_all: whether no generators of other machines may join, which would go on without these.
        without: override with which a run has no generators, for the hint of an error.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        logs: Path,
        *,
        are_all: bool = True,
        without: str = "task.generators=0",
    ) -> None:
        self._command, self._are_all, self._without = command, are_all, without
        self._all = [_Generator(logs / f"{index}.log") for index in range(count)]
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for index in range(count):
                self._start(index)
        except OSError:
            self.end()
            raise

    def _start(self, index: int) -> None:
        own = self._all[index]
        with own.log.open("ab") as log:
            own.process = subprocess.Popen(
                [*self._command, str(index), self._name(index), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=without_launcher(os.environ),
            )

    def _name(self, index: int) -> str:
        return f"generator-{index}-{self._all[index].num_starts}"

    def note_answers(self, name: str) -> None:
        """Note that the generator of a name has given answers, if it is one of these."""
        for index, own in enumerate(self._all):
            if self._name(index) == name:
                own.codes.clear()

    def restart_dead(self) -> list[str]:
        """Start the dead ones again, and give the names under which they were connected.

        Raises:
            PeerError: none is left, and none may be started again.
        """
        dead = []
        for index, own in enumerate(self._all):
            code = None if own.process is None else own.process.poll()
            if code is None:
                continue
            dead.append(self._name(index))
            own.codes.append(code)
            own.process = None
            # A config that is refused once is refused again.
            if len(own.codes) <= MOST_RESTARTS and code != ConfigError.exit_code:
                own.num_starts += 1
                self._start(index)
        if self._are_all and all(own.process is None for own in self._all):
            codes = ", ".join(str(code) for code in self._all[0].codes)
            is_refused = self._all[0].codes[-1] == ConfigError.exit_code
            raise PeerError(
                f"all generators have ended{'' if is_refused else ', again and again without an answer between'}",
                where=str(self._all[0].log),
                found=f"exit codes {codes}{_last_said(self._all[0].log)}",
                hint=f"what this file ends with; without generators: {self._without} checkpoint.allow_changes=true",
            )
        return dead

    def end(self) -> None:
        """Kill all generators: they hold nothing that would be lost."""
        for own in self._all:
            if own.process is not None:
                own.process.kill()
                own.process.wait()


def _last_said(log: Path) -> str:
    """Give the last message of a generator, as one line; "": it has printed nothing."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    # Parts of a message are indented; so is a traceback before its error.
    starts = [place for place, line in enumerate(lines) if line[:1].strip()]
    return "".join(f"; {printable(line.strip())}" for line in lines[starts[-1] :]) if starts else ""
