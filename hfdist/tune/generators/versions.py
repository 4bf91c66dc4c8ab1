"""The folder and the files of a version of the policy. No torch.

A version is the number of steps that have trained it. A rollback is a number: how often the run has gone back to an
earlier step, after which the same version has other weights. The folder's name is `ROLLBACK-VERSION`.
"""

from __future__ import annotations

from pathlib import Path


def version_folder(folder: Path, rollback: int, version: int) -> Path:
    """Give the folder of a version in `folder`, which has all versions."""
    return folder / f"{rollback}-{version}"


def version_files(folder: Path, rollback: int, version: int) -> list[Path]:
    """List the files of a version; FileNotFoundError: a newer version has taken its place."""
    of_version = version_folder(folder, rollback, version)
    files = sorted(of_version.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(of_version)
    return files
