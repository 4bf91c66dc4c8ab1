"""Where a version of the policy is. No torch.

A version has the folder `ROLLBACK-VERSION`. A rollback is a number: how often the run has gone back to an earlier step.
"""

from __future__ import annotations

from pathlib import Path


def version_folder(folder: Path, rollback: int, version: int) -> Path:
    """Give the folder of a version in that of all."""
    return folder / f"{rollback}-{version}"


def version_files(folder: Path, rollback: int, version: int) -> list[Path]:
    """List the files of a version; FileNotFoundError: a newer version has taken its place."""
    own = version_folder(folder, rollback, version)
    found = sorted(own.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(own)
    return found
