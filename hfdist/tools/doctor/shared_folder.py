"""The check whether all machines see one folder of runs: rank 0's machine leaves a file there, and the others look."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hfdist.tools.doctor import storage
from hfdist.tools.doctor.finding import Finding


@contextlib.contextmanager
def marked(run_dir: Path) -> Iterator[str | None]:
    """Keep a file in the folder of runs during the block, and give its name; None: it cannot be written."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".hfdist-doctor-", dir=storage.existing_part(run_dir))
    except OSError:
        yield None
        return
    os.close(descriptor)
    try:
        yield Path(name).name
    finally:
        Path(name).unlink(missing_ok=True)


def check_same_folder(run_dir: Path, mark: str | None, host: str, first: str) -> list[Finding]:
    """Check whether this machine sees the file that rank 0's machine keeps in the folder of runs.

    Args:
        run_dir: the folder of runs.
        mark: name of the file that `marked` keeps; None: it could not be written, and nothing is checked.
        host: name of this machine.
        first: name of rank 0's machine.
    """
    if mark is None or host == first:
        return []
    folder = storage.existing_part(run_dir)
    # Unlike Path.exists, this takes a disk that fails for a disk without the file.
    sees = os.path.exists(folder / mark)
    text = f"{folder} is {'the same folder as' if sees else 'not the folder of'} {first}"
    hint = "run.dir=FOLDER on a disk that all machines share: all ranks write into a checkpoint"
    return [Finding.of("shared folder", text, error=not sees, hint=hint)]
