"""Versions of the packages that a training depends on."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("hfdist", "transformers", "torch", "accelerate", "deepspeed", "datasets", "tokenizers", "safetensors")


def find_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Give the versions of Python and of packages."""
    return {"Python": platform.python_version()} | {package: _version_of(package) for package in packages}


@functools.cache  # to read what is installed takes milliseconds
def _version_of(package: str) -> str:
    # A checkout that is not installed has none.
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"
