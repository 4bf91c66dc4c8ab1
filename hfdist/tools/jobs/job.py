"""A job, which is a run with the machines on which it is to start, and the files that start it there."""

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
"""Text in the first lines of each job file: only a file that has it may be replaced."""
STAYS = (2, 3, 4, 5, 7, 8)
"""Exit codes after which the same command fails again, or must not go on; docs/jobs.md has them in words."""
AGAIN = PreemptedError.exit_code
"""Exit code after which the same command goes on."""
STANDARD_OUTPUT = Path("-")
"""Path of a job whose files are printed."""
_MARGIN_SECONDS = 30
"""Seconds between the moment when torchrun kills its ranks and the moment when the cluster kills torchrun."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is to be started on a cluster."""

    recipe: str
    """Name of the recipe, such as `pretrain`."""
    arguments: Sequence[str]
    """Flags and overrides of the recipe, as the user has given them."""
    config: RunConfig
    """The run's config, which these arguments make."""
    cluster: ClusterConfig
    command: Sequence[str]
    """The whole command line that writes the job, such as that of `hfdist job`."""
    path: Path
    """Path of the first file; `STANDARD_OUTPUT`: all files are printed."""

    @property
    def name(self) -> str:
        """The run's name as schedulers take it: small letters, digits and dashes, a letter first, at most 40."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.config.run.name).strip("-").lower()
        if not name[:1].isalpha():
            name = f"run-{name}"
        return name[:40].strip("-")

    @property
    def shell_path(self) -> str:
        """The path of the first file as a word of shell; `FILE` for files that are printed."""
        return "FILE" if self.path == STANDARD_OUTPUT else shlex.quote(str(self.path))

    @property
    def folder(self) -> str | None:
        """Folder in which the run starts; None: the folder in which the machines start their processes."""
        if self.cluster.folder is not None:
            return self.cluster.folder
        return str(Path.cwd()) if self.cluster.same_files else None

    def starting_in(self, folder: str) -> Job:
        """Give the same job with this folder to start in, unless `cluster.folder` has another one."""
        return replace(self, cluster=replace(self.cluster, folder=self.cluster.folder or folder))

    @property
    def shutdown_seconds(self) -> int:
        """Seconds that torchrun waits for its ranks after a signal."""
        return self.cluster.grace_seconds - _MARGIN_SECONDS

    def head(self, *submit: str) -> str:
        """Give the comment at the head of a file, with the commands that submit it, and the one that has written it."""
        lines = [f"{MARK}, and to be submitted with:", *(f"  {line}" for line in submit), "It was written by:"]
        lines.append(f"  {shlex.join(self.command)}")
        # The command has whatever the user gave: as one printable line it stays a comment.
        return "".join(f"# {printable(line)}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A file to be written."""

    path: Path
    text: str


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files that a target makes of a job."""

    files: Sequence[JobFile]
    submit: Sequence[str] = field(default_factory=list)
    """Commands that submit the job, in their order."""

    def write(self) -> None:
        """Write the files; their folders must exist."""
        for file in self.files:
            file.path.write_text(file.text, encoding="utf-8")
