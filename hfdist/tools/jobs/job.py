"""A job: a run and the machines on which it is to start; and the files that start it there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hfdist.config.run import RunConfig
from hfdist.errors import PreemptedError, printable
from hfdist.tools.jobs.cluster import ClusterConfig

MARK = "Written by `hfdist job`"
"""Text in the first lines of each job file: a file that has it is replaced."""
STAYS = (2, 3, 4, 5, 7, 8)
"""Exit codes after which the same command fails again, or must not go on: see docs/jobs.md."""
AGAIN = PreemptedError.exit_code
"""Exit code after which the same command goes on."""
STANDARD_OUTPUT = Path("-")
_MARGIN_SECONDS = 30
"""Seconds from the moment when torchrun kills its ranks to the one when the cluster kills torchrun."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is to be started on a cluster."""

    recipe: str
    arguments: Sequence[str]
    """Flags and overrides of the recipe, as given."""
    config: RunConfig
    cluster: ClusterConfig
    command: Sequence[str]
    """The whole command line of `hfdist job`."""
    path: Path
    """Path of the first file; `STANDARD_OUTPUT`: all files go there."""

    @property
    def name(self) -> str:
        """The run's name for schedulers: letters, digits and dashes, with a letter first and no dash last."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.config.run.name).strip("-").lower()
        return (name if name[:1].isalpha() else f"run-{name}")[:40].strip("-")

    @property
    def shell_path(self) -> str:
        """The first file, as a word of shell."""
        return "FILE" if self.path == STANDARD_OUTPUT else shlex.quote(str(self.path))

    @property
    def folder(self) -> str | None:
        """Folder in which the run starts; None: that in which the machines start it."""
        if self.cluster.folder is not None:
            return self.cluster.folder
        return str(Path.cwd()) if self.cluster.same_files else None

    def starting_in(self, folder: str) -> Job:
        """Give the job as it starts in `folder`, unless `cluster.folder` says otherwise."""
        return replace(self, cluster=replace(self.cluster, folder=self.cluster.folder or folder))

    @property
    def shutdown_seconds(self) -> int:
        """Seconds that torchrun waits for its ranks after a signal."""
        return self.cluster.grace_seconds - _MARGIN_SECONDS

    def head(self, *submit: str) -> str:
        """Give the comment at the head of a file; `submit`: the commands that submit it."""
        # The command holds whatever the user gave: on one line it stays a comment.
        lines = [f"{MARK}, and to be submitted with:", *(f"  {line}" for line in submit), "It was written by:"]
        lines.append(f"  {shlex.join(self.command)}")
        return "".join(f"# {printable(line)}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A file to be written."""

    path: Path
    text: str


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """What a target makes of a job."""

    files: Sequence[JobFile]
    submit: Sequence[str] = field(default_factory=list)
    """Commands that submit it."""

    def write(self) -> None:
        """Write the files; their folders are there."""
        for file in self.files:
            file.path.write_text(file.text, encoding="utf-8")
