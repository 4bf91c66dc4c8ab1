"""Whether all machines see one folder of runs: rank 0's machine leaves a file in it, and the others look."""

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
    """Check on the machine `host` whether it sees the file that `marked` keeps on the machine `first`."""
    if mark is None or host == first:
        return []
    there = storage.existing_part(run_dir)
    # Unlike Path.exists, it takes a disk that fails for one without the file.
    sees = os.path.exists(there / mark)
    text = f"{there} is {'the same folder as' if sees else 'not the folder of'} {first}"
    hint = "run.dir=FOLDER on a disk that all machines share: all ranks write into a checkpoint"
    return [Finding.of("shared folder", text, error=not sees, hint=hint)]
