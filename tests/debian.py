"""Programs that come as packages of Debian: tests that need one install it where they may."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path


@cache
def why_missing(program: str, *, package: str | None = None) -> str | None:
    """Install a program if it is missing. Gives the reason why it cannot be used, if so."""
    lock = Path(tempfile.gettempdir()) / "hfdist-tests-apt.lock"
    with lock.open("w") as file:
        # Tests in other processes may need one, too.
        fcntl.flock(file, fcntl.LOCK_EX)
        if shutil.which(program) is not None:
            return None
        install = ["apt-get", "install", "--yes", "--no-install-recommends", package or program]
        # A Debian without lists of packages has to fetch them first.
        for command in (["apt-get", "update"], install):
            if shutil.which("apt-get") is None or subprocess.run(command, capture_output=True).returncode != 0:
                return f"{program} is missing, and cannot be installed"
    return None
